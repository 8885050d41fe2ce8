// RMSNorm and LayerNorm of rows, with the residual added first. All in float32; what is stored is rounded once.
//
// A sum over a row has 16 partial sums, element i going to number i modulo 16: the same additions in the same order
// for every width of vector.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace pagefleet::PAGEFLEET_ISA {

// 16 elements, of which the first `count` are there; the others are 0.
struct Wide {
  vf v[kPanelVecs];
};

template <class T>
PF_INLINE Wide load_wide(const T* p, int64_t count) {
  Wide wide;
  if (count >= 16) {
    for (int i = 0; i < kPanelVecs; ++i) wide.v[i] = load(p + i * kLanes);
    return wide;
  }
  float some[16] = {};
  for (int i = 0; i < count; ++i) some[i] = to_float(p[i]);
  for (int i = 0; i < kPanelVecs; ++i) wide.v[i] = load(some + i * kLanes);
  return wide;
}

template <class T>
PF_INLINE void store_wide(T* p, const Wide& wide, int64_t count) {
  if (count >= 16) {
    for (int i = 0; i < kPanelVecs; ++i) store(p + i * kLanes, wide.v[i]);
    return;
  }
  float some[16];
  for (int i = 0; i < kPanelVecs; ++i) store(some + i * kLanes, wide.v[i]);
  for (int i = 0; i < count; ++i) from_float(some[i], p + i);
}

PF_INLINE float sum_wide(const Wide& wide) {
  float sums[16];
  for (int i = 0; i < kPanelVecs; ++i) store(sums + i * kLanes, wide.v[i]);
  return sum16(sums);
}

PF_INLINE Wide zero_wide() {
  Wide wide;
  for (int i = 0; i < kPanelVecs; ++i) wide.v[i] = vf{};
  return wide;
}

PF_INLINE void add_squares(const Wide& x, Wide& sums) {
  for (int i = 0; i < kPanelVecs; ++i) sums.v[i] = fma(x.v[i], x.v[i], sums.v[i]);
}

PF_INLINE float inverse_root(float square_sum, int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(square_sum / float(n) + eps);
}

// sum[i] = residual[i] + x[i], rounded: what the norm reads is what the next layer gets.
template <class T>
static void add_row(const T* residual, const T* x, T* sum, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    Wide a = load_wide(residual + i, n - i);
    const Wide b = load_wide(x + i, n - i);
    for (int j = 0; j < kPanelVecs; ++j) a.v[j] += b.v[j];
    store_wide(sum + i, a, n - i);
  }
}

template <class T>
static float mean_of(const T* x, int64_t n) {
  Wide sums = zero_wide();
  for (int64_t i = 0; i < n; i += 16) {
    const Wide a = load_wide(x + i, n - i);
    for (int j = 0; j < kPanelVecs; ++j) sums.v[j] += a.v[j];
  }
  return sum_wide(sums) / float(n);
}

// The sum of (x - mean)^2. What is past the end must not count as (0 - mean)^2.
template <class T>
static float squares_of(const T* x, int64_t n, float mean) {
  Wide sums = zero_wide();
  for (int64_t i = 0; i < n; i += 16) {
    Wide a = load_wide(x + i, n - i);
    for (int j = 0; j < kPanelVecs; ++j) a.v[j] -= mean;
    if (n - i < 16) {
      float some[16];
      store_wide(some, a, 16);
      a = load_wide(some, n - i);
    }
    add_squares(a, sums);
  }
  return sum_wide(sums);
}

template <class T>
static void norm_row(const NormArgs& args, const T* x, T* out) {
  const float mean = args.layer_norm ? mean_of(x, args.n) : 0.0f;
  const vf scale = set1(inverse_root(squares_of(x, args.n, mean), args.n, args.eps));
  for (int64_t i = 0; i < args.n; i += 16) {
    const int64_t count = args.n - i;
    Wide a = load_wide(x + i, count);
    const Wide weight = load_wide(args.weight + i, count);
    for (int j = 0; j < kPanelVecs; ++j) a.v[j] = (a.v[j] - mean) * scale * weight.v[j];
    if (args.bias) {
      const Wide bias = load_wide(args.bias + i, count);
      for (int j = 0; j < kPanelVecs; ++j) a.v[j] += bias.v[j];
    }
    store_wide(out + i, a, count);
  }
}

template <class T>
static void norm_rows_of(const NormArgs& args, int64_t begin, int64_t end) {
  const int64_t sum_stride = args.sum == args.residual ? args.stride : args.n;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)args.residual + row * args.stride;
    if (args.x) {
      T* sum = (T*)args.sum + row * sum_stride;
      add_row(x, (const T*)args.x + row * args.stride, sum, args.n);
      x = sum;
    }
    norm_row(args, x, (T*)args.out + row * args.n);
  }
}

static void norm_rows(const NormArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::f32) norm_rows_of<float>(args, begin, end);
  else if (args.dtype == DType::bf16) norm_rows_of<bf16>(args, begin, end);
  else norm_rows_of<f16>(args, begin, end);
}

}  // namespace pagefleet::PAGEFLEET_ISA
