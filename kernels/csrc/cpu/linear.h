// Matrix products with packed weights: the walk over tiles and what happens to a finished one, for every format.
//
// A format (dense.h, quantised.h) is a policy F: `kRows`, the most rows of a tile; `kPanels`, its panels;
// `kWide`, the panels of a single row; and
//   template <int R, int P> static void tile(const LinearArgs&, const uint8_t* const (&panels)[P], const uint8_t* a,
//                                            vf (&acc)[R][P][kPanelVecs])
// which leaves in acc the products of R prepared rows with P panels. An output is summed over k in one order,
// whatever R and P: that is what makes results independent of the batch.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace pagefleet::PAGEFLEET_ISA {

PF_INLINE vf activate(vf x, Activation activation) {
  switch (activation) {
    case Activation::silu:
      return x / (1.0f + exp(-x));
    case Activation::gelu:
      return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
    case Activation::gelu_tanh:
      return 0.5f * x * (1.0f + tanh(0.79788456080286536f * fma(x * x * x, set1(0.044715f), x)));
    default:
      return x;
  }
}

template <class T>
PF_INLINE void store_panel(T* out, const vf* v, int64_t columns) {
  if (columns >= kPanel) {
    for (int i = 0; i < kPanelVecs; ++i) store(out + i * kLanes, v[i]);
    return;
  }
  float wide[kPanel];
  for (int i = 0; i < kPanelVecs; ++i) store(wide + i * kLanes, v[i]);
  for (int i = 0; i < columns; ++i) from_float(wide[i], out + i);
}

PF_INLINE void add_bias(vf* v, const float* bias, int64_t columns) {
  if (!bias) return;
  float wide[kPanel] = {};
  for (int i = 0; i < (columns < kPanel ? columns : kPanel); ++i) wide[i] = bias[i];
  for (int i = 0; i < kPanelVecs; ++i) v[i] += load(wide + i * kLanes);
}

PF_INLINE void store_columns(const LinearArgs& args, int64_t row, int64_t column, int64_t columns, const vf* v) {
  const int64_t at = row * args.out_stride + column;
  if (args.out_dtype == DType::f32) store_panel((float*)args.out + at, v, columns);
  else if (args.out_dtype == DType::bf16) store_panel((bf16*)args.out + at, v, columns);
  else store_panel((f16*)args.out + at, v, columns);
}

// The products of R rows from `row` with P panels, bias added. A function of its own: with a gate it is called twice.
template <class F, int R, int P>
static __attribute__((noinline)) void tile_with_bias(const LinearArgs& args, int64_t row, int64_t panel, vf (&acc)[R][P][kPanelVecs]) {
  const uint8_t* panels[P];
  for (int p = 0; p < P; ++p) panels[p] = args.weight + (panel + p) * args.panel_bytes;
  F::template tile<R, P>(args, panels, args.a + row * args.a_stride, acc);
  if (!args.bias) return;
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) {
      const int64_t column = (panel + p) * kPanel;
      add_bias(acc[r][p], args.bias + column, args.n - column);
    }
}

// P panels from `panel` of R rows, done and stored; with a gate, panels of the left half and theirs of the right.
template <class F, int R, int P>
static void finish_tile(const LinearArgs& args, int64_t row, int64_t panel) {
  vf acc[R][P][kPanelVecs];
  tile_with_bias<F, R, P>(args, row, panel, acc);
  int64_t columns = args.n;
  if (args.gate != Activation::none) {
    columns /= 2;
    vf up[R][P][kPanelVecs];
    tile_with_bias<F, R, P>(args, row, panel + columns / kPanel, up);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < kPanelVecs; ++i) acc[r][p][i] = activate(acc[r][p][i], args.gate) * up[r][p][i];
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) {
      const int64_t column = (panel + p) * kPanel;
      store_columns(args, row + r, column, columns - column, acc[r][p]);
    }
}

// The largest tile of at most `rows` rows; returns how many it has. Of more than 6 rows there are only even ones:
// every tile is code of its own, times formats, times instruction sets.
template <class F, int P, int R>
static int64_t largest_tile(const LinearArgs& args, int64_t row, int64_t rows, int64_t panel) {
  if constexpr (R > 6 && R % 2) return largest_tile<F, P, R - 1>(args, row, rows, panel);
  if constexpr (R > 1)
    if (rows < R) return largest_tile<F, P, R - 1>(args, row, rows, panel);
  finish_tile<F, R, P>(args, row, panel);
  return R;
}

// As many rows at a time as there are registers for.
template <class F, int P>
static void column_of_tiles(const LinearArgs& args, int64_t begin, int64_t end, int64_t panel) {
  constexpr int kMost = P > F::kPanels ? F::kRows / 2 : F::kRows;
  for (int64_t row = begin; row < end;) {
    const int64_t left = end - row;
    // tiles as even as can be: 7 rows are 4 and 3, not 6 and 1
    const int64_t tiles = (left + kMost - 1) / kMost, rows = (left + tiles - 1) / tiles;
    row += largest_tile<F, P, kMost>(args, row, rows, panel);
  }
}

// Panels `begin` to `end` (with a gate, of the left half). A single row takes `kWide` panels at a time: enough sums
// under way to hide the latency of each, and enough places in memory to read from.
template <class F>
static void linear_range(const LinearArgs& args, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
  int64_t p = begin;
  if (row_end - row_begin == 1)
    for (; p + F::kWide <= end; p += F::kWide) finish_tile<F, 1, F::kWide>(args, row_begin, p);
  const bool few = row_end - row_begin <= F::kRows / 2;
  for (; (few || F::kPanels == 2) && p + 2 <= end; p += 2) column_of_tiles<F, 2>(args, row_begin, row_end, p);
  for (; p < end; ++p) column_of_tiles<F, 1>(args, row_begin, row_end, p);
}

}  // namespace pagefleet::PAGEFLEET_ISA
