// activation(left half) * right half of each row.
#pragma once

#include "linear.h"
#include "norm.h"

namespace pagefleet::PAGEFLEET_ISA {

template <class T>
static void gate_rows_of(const GateArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T *gate = (const T*)args.x + row * 2 * args.n, *up = gate + args.n;
    T* out = (T*)args.out + row * args.n;
    for (int64_t i = 0; i < args.n; i += 16) {
      Wide a = load_wide(gate + i, args.n - i);
      const Wide b = load_wide(up + i, args.n - i);
      for (int j = 0; j < kPanelVecs; ++j) a.v[j] = activate(a.v[j], args.activation) * b.v[j];
      store_wide(out + i, a, args.n - i);
    }
  }
}

static void gate_rows(const GateArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::f32) gate_rows_of<float>(args, begin, end);
  else if (args.dtype == DType::bf16) gate_rows_of<bf16>(args, begin, end);
  else gate_rows_of<f16>(args, begin, end);
}

}  // namespace pagefleet::PAGEFLEET_ISA
