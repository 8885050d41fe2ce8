// Dense weights: float32 [k][16], float16 [k][16], bfloat16 in pairs along k [k / 2][16][2] as the dot-product
// instruction takes them. Sums run over k in order: `kRun` products are added to each other, then to the total,
// which keeps rounding errors half as large as one long sum would have them.
#pragma once

#include "linear.h"

namespace pagefleet::PAGEFLEET_ISA {

#if defined(__AVX512F__)
constexpr int kDenseRows = 12;  // 12 x 2 accumulators of 32 registers
constexpr int kDensePanels = 2;
#elif defined(__AVX2__)
constexpr int kDenseRows = 6;  // 6 x 2 accumulators of 16 registers
constexpr int kDensePanels = 1;
#else
constexpr int kDenseRows = 2;
constexpr int kDensePanels = 1;
#endif

constexpr int64_t kRun = 64;  // even

template <int R, int P>
PF_INLINE void clear(vf (&acc)[R][P][kPanelVecs]) {
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < kPanelVecs; ++i) acc[r][p][i] = vf{};
}

template <int R, int P>
PF_INLINE void add_to(const vf (&sums)[R][P][kPanelVecs], vf (&acc)[R][P][kPanelVecs]) {
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < kPanelVecs; ++i) acc[r][p][i] = acc[r][p][i] + sums[r][p][i];
}

// T float or f16: rows and weights lie as they are.
template <class T>
struct Plain {
  static constexpr int kRows = kDenseRows, kPanels = kDensePanels, kWide = 4;

  template <int R, int P>
  PF_INLINE void tile(const LinearArgs& args, const uint8_t* const (&panels)[P], const uint8_t* a, vf (&acc)[R][P][kPanelVecs]) {
    const float* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = (const float*)(a + r * args.a_stride);
    clear(acc);
    for (int64_t start = 0; start < args.k; start += kRun) {
      const int64_t end = start + kRun < args.k ? start + kRun : args.k;
      vf sums[R][P][kPanelVecs];
      clear(sums);
      for (int64_t k = start; k < end; ++k) {
        vf w[P][kPanelVecs];
        for (int p = 0; p < P; ++p)
          for (int i = 0; i < kPanelVecs; ++i) w[p][i] = load((const T*)panels[p] + k * kPanel + i * kLanes);
        for (int r = 0; r < R; ++r) {
          const vf x = set1(rows[r][k]);
          for (int p = 0; p < P; ++p)
            for (int i = 0; i < kPanelVecs; ++i) sums[r][p][i] = fma(x, w[p][i], sums[r][p][i]);
        }
      }
      add_to(sums, acc);
    }
  }
};

// bfloat16 in pairs, with the instruction that multiplies them.
#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int kRows = kDenseRows, kPanels = kDensePanels, kWide = 4;

  template <int R, int P>
  PF_INLINE void tile(const LinearArgs& args, const uint8_t* const (&panels)[P], const uint8_t* a,
                      vf (&acc)[R][P][kPanelVecs]) {
    const int32_t* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = (const int32_t*)(a + r * args.a_stride);
    const int64_t pairs = (args.k + 1) / 2;
    clear(acc);
    for (int64_t start = 0; start < pairs; start += kRun / 2) {
      const int64_t end = start + kRun / 2 < pairs ? start + kRun / 2 : pairs;
      vf sums[R][P][kPanelVecs];
      clear(sums);
      for (int64_t k = start; k < end; ++k) {
        __m512bh w[P];
        for (int p = 0; p < P; ++p) w[p] = (__m512bh)_mm512_loadu_si512(panels[p] + k * 64);
        for (int r = 0; r < R; ++r) {
          const __m512bh x = (__m512bh)_mm512_set1_epi32(rows[r][k]);
          for (int p = 0; p < P; ++p) sums[r][p][0] = (vf)_mm512_dpbf16_ps((__m512)sums[r][p][0], w[p], x);
        }
      }
      add_to(sums, acc);
    }
  }
};
#else
// Without it a run's even products have one sum and its odd ones another, in float32. Few accumulators are kept in
// registers all at once; more would not fit, and take two passes over the run.
struct Pairs {
  static constexpr int kRows = kDenseRows, kPanels = kDensePanels, kWide = 4;

  PF_INLINE vf even(vu both) { return (vf)(both << 16); }
  PF_INLINE vf odd(vu both) { return (vf)(both & 0xffff0000u); }

  PF_INLINE vu load_pairs(const uint8_t* panel, int64_t pair, int i) {
    vu both;
    std::memcpy(&both, panel + pair * 64 + i * kLanes * 4, sizeof both);
    return both;
  }

  template <int R, int P, class Half>
  PF_INLINE void add_half(const uint8_t* const (&panels)[P], int64_t pair, const float* const (&rows)[R],
                          vf (&sums)[R][P][kPanelVecs], Half half, int64_t k) {
    vf w[P][kPanelVecs];
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < kPanelVecs; ++i) w[p][i] = half(load_pairs(panels[p], pair, i));
    for (int r = 0; r < R; ++r) {
      const vf x = set1(rows[r][k]);
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < kPanelVecs; ++i) sums[r][p][i] = fma(x, w[p][i], sums[r][p][i]);
    }
  }

  template <int R, int P>
  PF_INLINE void tile(const LinearArgs& args, const uint8_t* const (&panels)[P], const uint8_t* a,
                      vf (&acc)[R][P][kPanelVecs]) {
    const float* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = (const float*)(a + r * args.a_stride);
    const int64_t pairs = (args.k + 1) / 2;
    clear(acc);
    for (int64_t start = 0; start < pairs; start += kRun / 2) {
      const int64_t end = start + kRun / 2 < pairs ? start + kRun / 2 : pairs;
      vf evens[R][P][kPanelVecs], odds[R][P][kPanelVecs];
      clear(evens);
      clear(odds);
      if constexpr (R == 1 || 2 * R * P * kPanelVecs <= 12) {
        for (int64_t k = start; k < end; ++k) {
          add_half<R, P>(panels, k, rows, evens, even, 2 * k);
          add_half<R, P>(panels, k, rows, odds, odd, 2 * k + 1);
        }
      } else {
        for (int64_t k = start; k < end; ++k) add_half<R, P>(panels, k, rows, evens, even, 2 * k);
        for (int64_t k = start; k < end; ++k) add_half<R, P>(panels, k, rows, odds, odd, 2 * k + 1);
      }
      add_to(evens, acc);
      add_to(odds, acc);
    }
  }
};
#endif

#if defined(__AVX512BF16__)
using Prepared16 = bf16;  // what a bfloat16 weight multiplies with
#else
using Prepared16 = float;
#endif

template <class In, class Out>
PF_INLINE void convert_row(const In* x, int64_t k, Out* out) {
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) store(out + i, load(x + i));
  for (; i < k; ++i) from_float(to_float(x[i]), out + i);
}

template <class Out>
static void prepare_dense(const PrepareArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    Out* out = (Out*)(args.out + row * args.out_stride);
    if (args.dtype == DType::f32) convert_row((const float*)args.x + row * args.stride, args.k, out);
    else if (args.dtype == DType::bf16) convert_row((const bf16*)args.x + row * args.stride, args.k, out);
    else convert_row((const f16*)args.x + row * args.stride, args.k, out);
    if (args.k % 2) from_float(0.0f, out + args.k);  // the partner of an odd pair
  }
}

template <class Out>
PF_INLINE void gather_row(const GatherArgs& args, int64_t row, Out* out) {
  const int64_t id = args.ids[row];
  const uint8_t* panel = args.weight + id / kPanel * args.panel_bytes;
  const int64_t column = id % kPanel;
  for (int64_t k = 0; k < args.k; ++k) {
    if (args.format == Format::f32) from_float(((const float*)panel)[k * kPanel + column], out + k);
    else if (args.format == Format::f16) from_float(to_float(((const f16*)panel)[k * kPanel + column]), out + k);
    else from_float(to_float(((const bf16*)panel)[(k / 2 * kPanel + column) * 2 + k % 2]), out + k);
  }
}

static void gather_dense(const GatherArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (args.dtype == DType::f32) gather_row(args, row, (float*)args.out + row * args.k);
    else if (args.dtype == DType::bf16) gather_row(args, row, (bf16*)args.out + row * args.k);
    else gather_row(args, row, (f16*)args.out + row * args.k);
  }
}

}  // namespace pagefleet::PAGEFLEET_ISA
