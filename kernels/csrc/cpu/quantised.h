// Quantised weights in their own bits, times activations that are quantised on the fly.
//
// A row of activations is cut into blocks of 32: q = round(x * (127 / max|x|)), to
// nearest even, and a scale max|x| / 127. Products of integers are summed exactly; then, block after block,
//   Q8_0, Q4_0   sum += float(dot) * (d * s)                  dot over q_w * q_x (Q4_0: q_w - 8)
//   Q4_1         sum += float(dot) * (d * s) + m * (s * float(sum of q_x)), added one after the other
//   Q4_K         as Q4_1, with d * scale for d and -(dmin * min) for m, for each 32
//   Q6_K         as Q8_0, with d * scale for d and q_w - 32, for each 16
//   int8         sum += float(dot) * s, and at the end sum * w_scale
// in float32, every operation rounded on its own: the same bits on every processor, and in numpy.
#pragma once

#include "linear.h"
#include "panels.h"

namespace pagefleet::PAGEFLEET_ISA {

typedef uint8_t vb __attribute__((vector_size(kLanes * 4)));   // four inputs of each output
typedef uint16_t vh __attribute__((vector_size(kLanes * 4)));

PF_INLINE vb load_quants(const uint8_t* p) {
  vb v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

PF_INLINE vb broadcast4(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return (vb)set1i(four);
}

// kLanes bytes as integers.
PF_INLINE vi load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  vi v;
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return v;
#endif
}

PF_INLINE vi load_bytes(const int8_t* p) { return (load_bytes((const uint8_t*)p) ^ 128) - 128; }

// -- exact sums of four products ------------------------------------------------------------------------

#if defined(__AVX2__) && !defined(__AVX512F__)
PF_INLINE vi add_pairs(vb sums) { return (vi)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
PF_INLINE vb multiply(vb w, vb x) { return (vb)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
PF_INLINE vb add16(vb a, vb b) { return (vb)_mm256_add_epi16((__m256i)a, (__m256i)b); }
#elif defined(__AVX512F__)
PF_INLINE vi add_pairs(vb sums) { return (vi)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)); }
PF_INLINE vb multiply(vb w, vb x) { return (vb)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
PF_INLINE vb add16(vb a, vb b) { return (vb)_mm512_add_epi16((__m512i)a, (__m512i)b); }
#else
PF_INLINE vi dot4(vi acc, vb w, vb x, bool is_signed) {
  for (int lane = 0; lane < kLanes; ++lane) {
    int32_t sum = 0;
    for (int i = 0; i < 4; ++i) {
      const int32_t weight = is_signed ? int32_t(int8_t(w[lane * 4 + i])) : int32_t(w[lane * 4 + i]);
      sum += weight * int32_t(int8_t(x[lane * 4 + i]));
    }
    acc[lane] += sum;
  }
  return acc;
}
#endif

// Signed weights. The dot-product instruction wants unsigned ones: it is given w + 128, and starts at -128 * sum(x).
#if defined(__AVX512VNNI__)
PF_INLINE vi start_signed(int32_t sum) { return set1i(-128 * sum); }
PF_INLINE vb code_signed(vb w) { return w ^ 128; }
PF_INLINE vi dot_signed(vi acc, vb w, vb x) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x); }
#else
PF_INLINE vi start_signed(int32_t) { return vi{}; }
PF_INLINE vb code_signed(vb w) { return w; }
PF_INLINE vi dot_signed(vi acc, vb w, vb x) {  // |w| * (x with w's sign): at most 2 * 128 * 127 in 16 bits
#if defined(__AVX512F__)
  const __mmask64 negative = _mm512_movepi8_mask((__m512i)w);
  const __m512i turned = _mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
  return acc + add_pairs(multiply((vb)_mm512_abs_epi8((__m512i)w), (vb)turned));
#elif defined(__AVX2__)
  const vb turned = (vb)_mm256_sign_epi8((__m256i)x, (__m256i)w);
  return acc + add_pairs(multiply((vb)_mm256_abs_epi8((__m256i)w), turned));
#else
  return dot4(acc, w, x, true);
#endif
}
#endif

// Unsigned weights of up to 6 bits: several products are added in 16 bits before they are widened (`Narrow`).
#if defined(__AVX512VNNI__)
typedef vi Narrow;
PF_INLINE Narrow dot_small(Narrow acc, vb w, vb x) {
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}
PF_INLINE vi widen(Narrow acc) { return acc; }
#elif defined(__AVX2__)
typedef vb Narrow;
PF_INLINE Narrow dot_small(Narrow acc, vb w, vb x) { return add16(acc, multiply(w, x)); }
PF_INLINE vi widen(Narrow acc) { return add_pairs(acc); }
#else
typedef vi Narrow;
PF_INLINE Narrow dot_small(Narrow acc, vb w, vb x) { return dot4(acc, w, x, false); }
PF_INLINE vi widen(Narrow acc) { return acc; }
#endif

PF_INLINE vb low_nibbles(vb v) { return v & 15; }
PF_INLINE vb high_nibbles(vb v) { return (vb)((vh)v >> 4) & 15; }

// -- prepared activations -------------------------------------------------------------------------------

// A prepared row: k values in whole blocks, a scale a block, the sum of every 16 values.
struct Prepared {
  const int8_t* q;
  const float* scale;
  const int32_t* sums;

  Prepared(const uint8_t* row, int64_t blocks)
      : q((const int8_t*)row), scale((const float*)(row + blocks * 32)), sums((const int32_t*)(scale + blocks)) {}
  int32_t sum32(int64_t block) const { return sums[2 * block] + sums[2 * block + 1]; }
};

static int64_t blocks_of(int64_t k) { return (k + 31) / 32; }

static int64_t prepared_bytes_quantised(Format, int64_t k) { return (blocks_of(k) * (32 + 4 + 8) + 63) / 64 * 64; }

// max|x| of n <= 32 padded values; NaN if one of them is not finite.
PF_INLINE float magnitude(const float* x) {
  vf highest = vf{}, poison = vf{};
  for (int i = 0; i < 32; i += kLanes) {
    const vf v = load(x + i);
    highest = max(highest, abs(v));
    poison = poison + v * 0.0f;
  }
  float result = 0, bad = 0;
  for (int i = 0; i < kLanes; ++i) {
    result = highest[i] > result ? highest[i] : result;
    bad += poison[i];
  }
  return result + bad;
}

PF_INLINE void quantise32(const float* x, float inverse, int8_t* q) {
  for (int i = 0; i < 32; i += kLanes) {
    const vi v = to_int(max(min(round(load(x + i) * inverse), set1(127.0f)), set1(-127.0f)));
    for (int j = 0; j < kLanes; ++j) q[i + j] = int8_t(v[j]);
  }
}

PF_INLINE int32_t sum_of_16(const int8_t* q) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += q[i];
  return sum;
}

template <class T>
PF_INLINE void load_block(const T* x, int64_t count, float* out) {  // 32 values, zeros past the last
  if (count >= 32) {
    for (int i = 0; i < 32; i += kLanes) store(out + i, load(x + i));
    return;
  }
  for (int i = 0; i < 32; ++i) out[i] = i < count ? to_float(x[i]) : 0.0f;
}

template <class T>
static void prepare_row(const T* x, int64_t k, uint8_t* out) {
  const int64_t blocks = blocks_of(k);
  int8_t* q = (int8_t*)out;
  float* scale = (float*)(out + blocks * 32);
  int32_t* sums = (int32_t*)(scale + blocks);
  float wide[32];
  for (int64_t b = 0; b < blocks; ++b) {
    load_block(x + b * 32, k - b * 32, wide);
    const float highest = magnitude(wide);
    if (highest > 0) quantise32(wide, 127.0f / highest, q + b * 32);
    else std::memset(q + b * 32, 0, 32);  // all zeros, or a NaN: the scale tells
    scale[b] = highest / 127.0f;
    sums[2 * b] = sum_of_16(q + b * 32);
    sums[2 * b + 1] = sum_of_16(q + b * 32 + 16);
  }
}

static void prepare_quantised(const PrepareArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    uint8_t* out = args.out + row * args.out_stride;
    const int64_t at = row * args.stride;
    if (args.dtype == DType::f32) prepare_row((const float*)args.x + at, args.k, out);
    else if (args.dtype == DType::bf16) prepare_row((const bf16*)args.x + at, args.k, out);
    else prepare_row((const f16*)args.x + at, args.k, out);
  }
}

// -- products -------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kQuantRows = 6, kQuantPanels = 2;
#elif defined(__AVX2__)
constexpr int kQuantRows = 4, kQuantPanels = 1;
#else
constexpr int kQuantRows = 2, kQuantPanels = 1;
#endif

template <int R, int P>
using TileSums = vf[R][P][kPanelVecs];

template <int R>
struct PreparedRows {
  const uint8_t* first;
  int64_t stride, blocks;

  PF_INLINE PreparedRows make(const LinearArgs& args, const uint8_t* a) { return {a, args.a_stride, blocks_of(args.k)}; }
  Prepared operator[](int r) const { return Prepared(first + r * stride, blocks); }
};

template <int R, int P>
PF_INLINE void clear_sums(TileSums<R, P>& sums) {
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < kPanelVecs; ++i) sums[r][p][i] = vf{};
}

PF_INLINE vf half_scale(const uint8_t* p, int i) { return load((const f16*)p + i * kLanes); }

// dots of 32 nibbles of each output with 32 values of each row
template <int R, int P>
PF_INLINE void dot_nibbles(const uint8_t* const (&quants)[P], const PreparedRows<R>& rows, int64_t block,
                           Narrow (&dots)[R][P][kPanelVecs]) {
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < kPanelVecs; ++i) dots[r][p][i] = Narrow{};
  for (int v = 0; v < 4; ++v) {
    vb low[P][kPanelVecs], high[P][kPanelVecs];
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < kPanelVecs; ++i) {
        const vb both = load_quants(quants[p] + v * 64 + i * kLanes * 4);
        low[p][i] = low_nibbles(both);
        high[p][i] = high_nibbles(both);
      }
    for (int r = 0; r < R; ++r) {
      const int8_t* q = rows[r].q + block * 32 + v * 8;
      const vb x = broadcast4(q), y = broadcast4(q + 4);
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < kPanelVecs; ++i)
          dots[r][p][i] = dot_small(dot_small(dots[r][p][i], low[p][i], x), high[p][i], y);
    }
  }
}

// dots of up to 8 groups of four signed values of each output with those of each row
template <int R, int P>
PF_INLINE void dot_signed_groups(const uint8_t* const (&quants)[P], const PreparedRows<R>& rows, int64_t block,
                                 int64_t groups, vi (&dots)[R][P][kPanelVecs]) {
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < kPanelVecs; ++i) dots[r][p][i] = start_signed(rows[r].sum32(block));
  for (int64_t g = 0; g < groups; ++g) {
    vb w[P][kPanelVecs];
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < kPanelVecs; ++i) w[p][i] = code_signed(load_quants(quants[p] + g * 64 + i * kLanes * 4));
    for (int r = 0; r < R; ++r) {
      const vb x = broadcast4(rows[r].q + block * 32 + g * 4);
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < kPanelVecs; ++i) dots[r][p][i] = dot_signed(dots[r][p][i], w[p][i], x);
    }
  }
}

struct Q8_0 {
  static constexpr int kRows = kQuantRows, kPanels = kQuantPanels, kWide = 2;

  template <int R, int P>
  PF_INLINE void tile(const LinearArgs& args, const uint8_t* const (&panels)[P], const uint8_t* a,
                      TileSums<R, P>& acc) {
    const auto rows = PreparedRows<R>::make(args, a);
    TileSums<R, P> sums;
    clear_sums<R, P>(sums);
    for (int64_t b = 0; b < rows.blocks; ++b) {
      vi dots[R][P][kPanelVecs];
      const uint8_t* quants[P];
      for (int p = 0; p < P; ++p) quants[p] = panels[p] + b * kQ8Bytes + kQ8Quants;
      dot_signed_groups<R, P>(quants, rows, b, 8, dots);
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < kPanelVecs; ++i) {
          const vf d = half_scale(panels[p] + b * kQ8Bytes, i);
          for (int r = 0; r < R; ++r) sums[r][p][i] = sums[r][p][i] + to_float(dots[r][p][i]) * (d * rows[r].scale[b]);
        }
    }
    std::memcpy(acc, sums, sizeof sums);
  }
};

// Q4_0 and Q4_1.
template <int64_t Bytes, int64_t Quants, bool Minimum>
struct Q4 {
  static constexpr int kRows = kQuantRows, kPanels = kQuantPanels, kWide = 2;

  template <int R, int P>
  PF_INLINE void tile(const LinearArgs& args, const uint8_t* const (&panels)[P], const uint8_t* a, TileSums<R, P>& acc) {
    const auto rows = PreparedRows<R>::make(args, a);
    TileSums<R, P> sums;
    clear_sums<R, P>(sums);
    for (int64_t b = 0; b < rows.blocks; ++b) {
      const uint8_t* blocks[P];
      const uint8_t* quants[P];
      for (int p = 0; p < P; ++p) blocks[p] = panels[p] + b * Bytes, quants[p] = blocks[p] + Quants;
      Narrow dots[R][P][kPanelVecs];
      dot_nibbles<R, P>(quants, rows, b, dots);
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < kPanelVecs; ++i) {
          const vf d = half_scale(blocks[p], i);
          for (int r = 0; r < R; ++r) {
            const float scale = rows[r].scale[b];
            const int32_t total = rows[r].sum32(b);
            const vi dot = widen(dots[r][p][i]) - (Minimum ? 0 : 8 * total);
            sums[r][p][i] = sums[r][p][i] + to_float(dot) * (d * scale);
            if constexpr (Minimum)
              sums[r][p][i] = sums[r][p][i] + half_scale(blocks[p] + kQ41Mins, i) * (scale * float(total));
          }
        }
    }
    std::memcpy(acc, sums, sizeof sums);
  }
};

using Q4_0 = Q4<kQ40Bytes, kQ40Quants, false>;
using Q4_1 = Q4<kQ41Bytes, kQ41Quants, true>;

// The six-bit scale and minimum of sub-block `sub`, of kLanes outputs.
PF_INLINE void unpack_scales(const uint8_t* codes, int sub, int i, vf& scale, vf& minimum) {
  const auto code = [&](int at) { return load_bytes(codes + at * 16 + i * kLanes); };
  if (sub < 4) {
    scale = to_float(code(sub) & 63);
    minimum = to_float(code(sub + 4) & 63);
  } else {
    scale = to_float((code(sub + 4) & 15) | ((code(sub - 4) >> 6) << 4));
    minimum = to_float((code(sub + 4) >> 4) | ((code(sub) >> 6) << 4));
  }
}

struct Q4_K {
  static constexpr int kRows = kQuantRows, kPanels = kQuantPanels, kWide = 2;

  template <int R, int P>
  PF_INLINE void tile(const LinearArgs& args, const uint8_t* const (&panels)[P], const uint8_t* a, TileSums<R, P>& acc) {
    const auto rows = PreparedRows<R>::make(args, a);
    TileSums<R, P> sums;
    clear_sums<R, P>(sums);
    for (int64_t b = 0; b < rows.blocks; ++b) {
      const int sub = int(b % 8);
      const uint8_t* blocks[P];
      const uint8_t* quants[P];
      for (int p = 0; p < P; ++p) {
        blocks[p] = panels[p] + b / 8 * kQ4KBytes;
        quants[p] = blocks[p] + kQ4KQuants + sub * 256;
      }
      Narrow dots[R][P][kPanelVecs];
      dot_nibbles<R, P>(quants, rows, b, dots);
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < kPanelVecs; ++i) {
          vf scale, minimum;
          unpack_scales(blocks[p] + kQ4KScales, sub, i, scale, minimum);
          const vf d = half_scale(blocks[p], i) * scale, m = half_scale(blocks[p] + kQ4KMins, i) * minimum;
          for (int r = 0; r < R; ++r) {
            const float s = rows[r].scale[b];
            sums[r][p][i] = sums[r][p][i] + to_float(widen(dots[r][p][i])) * (d * s);
            sums[r][p][i] = sums[r][p][i] - m * (s * float(rows[r].sum32(b)));
          }
        }
    }
    std::memcpy(acc, sums, sizeof sums);
  }
};

struct Q6_K {
  static constexpr int kRows = kQuantRows, kPanels = kQuantPanels, kWide = 2;

  // Six-bit values of group t of 4 of a half block of 16.
  PF_INLINE vb values(const uint8_t* low, const uint8_t* high, int t, int i) {
    const vb nibbles = load_quants(low + t / 2 * 64 + i * kLanes * 4);
    const vh bits = (vh)load_quants(high + i * kLanes * 4);
    const vb top = t == 0 ? (vb)(bits << 4) : t == 1 ? (vb)(bits << 2) : t == 2 ? (vb)bits : (vb)(bits >> 2);
    return (t % 2 ? high_nibbles(nibbles) : low_nibbles(nibbles)) | (top & 48);
  }

  template <int R, int P>
  PF_INLINE void tile(const LinearArgs& args, const uint8_t* const (&panels)[P], const uint8_t* a, TileSums<R, P>& acc) {
    const auto rows = PreparedRows<R>::make(args, a);
    TileSums<R, P> sums;
    clear_sums<R, P>(sums);
    for (int64_t half = 0; half < 2 * rows.blocks; ++half) {
      const int64_t sub = half % 16;
      const uint8_t* blocks[P];
      for (int p = 0; p < P; ++p) blocks[p] = panels[p] + half / 16 * kQ6KBytes;
      vi dots[R][P][kPanelVecs];
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
          for (int i = 0; i < kPanelVecs; ++i) dots[r][p][i] = set1i(-32 * rows[r].sums[half]);
      for (int t = 0; t < 4; t += 2) {  // two products of six bits and seven fit 16 bits, four do not
        for (int p = 0; p < P; ++p)
          for (int i = 0; i < kPanelVecs; ++i) {
            const uint8_t* low = blocks[p] + kQ6KLow + sub * 128;
            const uint8_t* high = blocks[p] + kQ6KHigh + sub * 64;
            const vb w = values(low, high, t, i), v = values(low, high, t + 1, i);
            for (int r = 0; r < R; ++r) {
              const int8_t* q = rows[r].q + half * 16 + t * 4;
              const Narrow both = dot_small(dot_small(Narrow{}, w, broadcast4(q)), v, broadcast4(q + 4));
              dots[r][p][i] = dots[r][p][i] + widen(both);
            }
          }
      }
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < kPanelVecs; ++i) {
          const int8_t* scales = (const int8_t*)blocks[p] + kQ6KScales + sub * 16;
          const vf d = half_scale(blocks[p], i) * to_float(load_bytes(scales + i * kLanes));
          for (int r = 0; r < R; ++r)
            sums[r][p][i] = sums[r][p][i] + to_float(dots[r][p][i]) * (d * rows[r].scale[half / 2]);
        }
    }
    std::memcpy(acc, sums, sizeof sums);
  }
};

struct Int8 {
  static constexpr int kRows = kQuantRows, kPanels = kQuantPanels, kWide = 2;

  template <int R, int P>
  PF_INLINE void tile(const LinearArgs& args, const uint8_t* const (&panels)[P], const uint8_t* a,
                      TileSums<R, P>& acc) {
    const auto rows = PreparedRows<R>::make(args, a);
    const int64_t groups = (args.k + 3) / 4;
    TileSums<R, P> sums;
    clear_sums<R, P>(sums);
    for (int64_t b = 0; b < rows.blocks; ++b) {
      vi dots[R][P][kPanelVecs];
      const uint8_t* quants[P];
      for (int p = 0; p < P; ++p) quants[p] = panels[p] + kInt8Quants + b * 512;
      dot_signed_groups<R, P>(quants, rows, b, groups - b * 8 < 8 ? groups - b * 8 : 8, dots);
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
          for (int i = 0; i < kPanelVecs; ++i)
            sums[r][p][i] = sums[r][p][i] + to_float(dots[r][p][i]) * rows[r].scale[b];
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < kPanelVecs; ++i)
          acc[r][p][i] = sums[r][p][i] * load((const float*)panels[p] + i * kLanes);
  }
};

// -- one row of a weight, for an embedding ----------------------------------------------------------------

PF_INLINE float half_at(const uint8_t* p, int64_t column) { return to_float(((const f16*)p)[column]); }

PF_INLINE int nibble_at(const uint8_t* quants, int64_t column, int i) {  // value i of 32
  const uint8_t both = quants[i / 8 * 64 + column * 4 + i % 4];
  return i % 8 < 4 ? both & 15 : both >> 4;
}

PF_INLINE int code_at(const uint8_t* codes, int64_t column, int at) { return codes[at * 16 + column]; }

// Value k of an output, with the operations, in their order, of the gguf library.
static float value_at(Format format, const uint8_t* panel, int64_t column, int64_t k) {
  const int i = int(k % 32);
  switch (format) {
    case Format::int8: {
      const int q = int8_t(panel[kInt8Quants + k / 4 * 64 + column * 4 + k % 4]);
      return float(q) * ((const float*)panel)[column];
    }
    case Format::q8_0: {
      const uint8_t* block = panel + k / 32 * kQ8Bytes;
      return float(int8_t(block[kQ8Quants + i / 4 * 64 + column * 4 + i % 4])) * half_at(block, column);
    }
    case Format::q4_0: {
      const uint8_t* block = panel + k / 32 * kQ40Bytes;
      return half_at(block, column) * float(nibble_at(block + kQ40Quants, column, i) - 8);
    }
    case Format::q4_1: {
      const uint8_t* block = panel + k / 32 * kQ41Bytes;
      const float scaled = half_at(block, column) * float(nibble_at(block + kQ41Quants, column, i));
      return scaled + half_at(block + kQ41Mins, column);
    }
    case Format::q4_k: {
      const uint8_t* block = panel + k / 256 * kQ4KBytes;
      const uint8_t* codes = block + kQ4KScales;
      const int sub = int(k % 256 / 32);
      int scale = code_at(codes, column, sub) & 63, minimum = code_at(codes, column, sub + 4 < 12 ? sub + 4 : 11) & 63;
      if (sub >= 4) {
        scale = (code_at(codes, column, sub + 4) & 15) | ((code_at(codes, column, sub - 4) >> 6) << 4);
        minimum = (code_at(codes, column, sub + 4) >> 4) | ((code_at(codes, column, sub) >> 6) << 4);
      }
      const float d = half_at(block, column) * float(scale), m = half_at(block + kQ4KMins, column) * float(minimum);
      return d * float(nibble_at(block + kQ4KQuants + sub * 256, column, i)) - m;
    }
    default: {
      const uint8_t* block = panel + k / 256 * kQ6KBytes;
      const int group = int(k % 256 / 32), sub = int(k % 256 / 16);
      const int low = nibble_at(block + kQ6KLow + group * 256, column, i);
      const uint8_t high = block[kQ6KHigh + group * 128 + i / 16 * 64 + column * 4 + i % 4];
      const int q = (low | (((high >> (i % 16 / 4 * 2)) & 3) << 4)) - 32;
      return half_at(block, column) * float(int8_t(code_at(block + kQ6KScales, column, sub))) * float(q);
    }
  }
}

template <class T>
PF_INLINE void gather_quantised_row(const GatherArgs& args, int64_t row, T* out) {
  const int64_t id = args.ids[row];
  const uint8_t* panel = args.weight + id / kPanel * args.panel_bytes;
  for (int64_t k = 0; k < args.k; ++k) from_float(value_at(args.format, panel, id % kPanel, k), out + k);
}

static void gather_quantised(const GatherArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (args.dtype == DType::f32) gather_quantised_row(args, row, (float*)args.out + row * args.k);
    else if (args.dtype == DType::bf16) gather_quantised_row(args, row, (bf16*)args.out + row * args.k);
    else gather_quantised_row(args, row, (f16*)args.out + row * args.k);
  }
}

}  // namespace pagefleet::PAGEFLEET_ISA
