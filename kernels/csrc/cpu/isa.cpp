// Compiled once for each instruction set: the kernels' table of that unit.
#include "kernels.h"

#include "attention.h"
#include "dense.h"
#include "gate.h"
#include "linear.h"
#include "norm.h"
#include "quantised.h"
#include "rope.h"
#include "sample.h"

#define PF_STRING(x) #x
#define PF_NAME(x) PF_STRING(x)

namespace pagefleet::PAGEFLEET_ISA {

static int64_t prepared_bytes(Format format, int64_t k) {
  const int64_t even = (k + 1) / 2 * 2;
  switch (format) {
    case Format::f32:
    case Format::f16:
      return (k * 4 + 63) / 64 * 64;
    case Format::bf16:
      return (even * int64_t(sizeof(Prepared16)) + 63) / 64 * 64;
    default:
      return prepared_bytes_quantised(format, k);
  }
}

static void prepare(const PrepareArgs& args, int64_t begin, int64_t end) {
  if (args.format == Format::bf16) prepare_dense<Prepared16>(args, begin, end);
  else if (args.format == Format::f32 || args.format == Format::f16) prepare_dense<float>(args, begin, end);
  else prepare_quantised(args, begin, end);
}

static void linear(const LinearArgs& args, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
  switch (args.format) {
    case Format::f32: return linear_range<Plain<float>>(args, row_begin, row_end, begin, end);
    case Format::bf16: return linear_range<Pairs>(args, row_begin, row_end, begin, end);
    case Format::f16: return linear_range<Plain<f16>>(args, row_begin, row_end, begin, end);
    case Format::int8: return linear_range<Int8>(args, row_begin, row_end, begin, end);
    case Format::q8_0: return linear_range<Q8_0>(args, row_begin, row_end, begin, end);
    case Format::q4_0: return linear_range<Q4_0>(args, row_begin, row_end, begin, end);
    case Format::q4_1: return linear_range<Q4_1>(args, row_begin, row_end, begin, end);
    case Format::q4_k: return linear_range<Q4_K>(args, row_begin, row_end, begin, end);
    case Format::q6_k: return linear_range<Q6_K>(args, row_begin, row_end, begin, end);
  }
}

static void gather(const GatherArgs& args, int64_t begin, int64_t end) {
  if (args.format == Format::f32 || args.format == Format::bf16 || args.format == Format::f16)
    gather_dense(args, begin, end);
  else
    gather_quantised(args, begin, end);
}

}  // namespace pagefleet::PAGEFLEET_ISA

namespace pagefleet {

#define PF_JOIN(a, b) a##b
#define PF_TABLE(isa) PF_JOIN(kernels_, isa)

extern const Kernels PF_TABLE(PAGEFLEET_ISA);
const Kernels PF_TABLE(PAGEFLEET_ISA) = {
    PF_NAME(PAGEFLEET_ISA),
    PAGEFLEET_ISA::prepared_bytes,
    PAGEFLEET_ISA::prepare,
    PAGEFLEET_ISA::linear,
    PAGEFLEET_ISA::gather,
    PAGEFLEET_ISA::norm_rows,
    PAGEFLEET_ISA::rope_tokens,
    PAGEFLEET_ISA::attention_scratch,
    PAGEFLEET_ISA::attention_items,
    PAGEFLEET_ISA::merge_items,
    PAGEFLEET_ISA::gate_rows,
    PAGEFLEET_ISA::sample_scratch,
    PAGEFLEET_ISA::sample_rows,
    PAGEFLEET_ISA::mask_rows,
};

}  // namespace pagefleet
