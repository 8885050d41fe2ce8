// Quantised weights in their own bits (panels.h), times activations that are quantised on the fly.
//
// A row of activations is cut into blocks of 32, each q = round(x * (127 / max|x|)) to nearest even with a scale
// s = max|x| / 127. A block below 2^-100 is zeros, one with a value that is not finite has NaN for its scale.
// Products of integers are summed exactly; then, for one block of 32 inputs after the other,
//   Q8_0   sum += float(dot) * (d * s)
//   Q4_0   the same, dot over q_w - 8
//   Q4_1   sum += float(dot) * (d * s), then sum += m * (s * float(sum of q))
//   Q4_K   sum += float(dot) * ((d * scale) * s), then sum -= (dmin * min) * (s * float(sum of q))
//   Q6_K   sum += float(scale_0 * dot_0 + scale_1 * dot_1) * (d * s), dots of 16 over q_w - 32; the integer is exact
//   int8   sum += float(dot) * s, and after the last block sum * w_scale
// in float32, every operation rounded on its own: the same bits on every processor, and in numpy.
#pragma once

#include "linear.h"
#include "panels.h"

namespace pagefleet::PAGEFLEET_ISA {

typedef uint8_t vb __attribute__((vector_size(kLanes * 4)));  // four inputs of each output
typedef int16_t vs __attribute__((vector_size(kLanes * 4)));

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

PF_INLINE vf half_scales(const uint16_t* p, int i) { return load((const f16*)p + i * kLanes); }

PF_INLINE vf byte_scales(const uint8_t* p, int i) {
#if defined(__AVX512F__)
  return to_float((vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p + i)));
#elif defined(__AVX2__)
  return to_float((vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + i * kLanes))));
#else
  vf v;
  for (int j = 0; j < kLanes; ++j) v[j] = p[i * kLanes + j];
  return v;
#endif
}

PF_INLINE vs signed_pairs(const int8_t (*p)[2], int i) {  // two of each output
#if defined(__AVX512F__)
  return (vs)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p + i));
#elif defined(__AVX2__)
  return (vs)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p + i));
#else
  vs v;
  for (int j = 0; j < 2 * kLanes; ++j) v[j] = p[i * kLanes + j / 2][j % 2];
  return v;
#endif
}

// -- exact sums of products of weights and activations ---------------------------------------------------

PF_INLINE vi low16(vi v) { return v << 16 >> 16; }

PF_INLINE vi high16(vi v) { return v >> 16; }

#if defined(__AVX512F__)
PF_INLINE vs multiply(vb w, vb x) { return (vs)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
PF_INLINE vi multiply_pairs(vs a, vs b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
PF_INLINE vs multiply(vb w, vb x) { return (vs)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
PF_INLINE vi multiply_pairs(vs a, vs b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#else
PF_INLINE vi add_products(vi sums, vb w, vb x) {  // of signed bytes; two products fit 16 bits, x is at least -127
  const vs low = ((vs)w << 8 >> 8) * ((vs)x << 8 >> 8), high = ((vs)w >> 8) * ((vs)x >> 8);
  const vi both = (vi)(low + high);
  return sums + low16(both) + high16(both);
}
#endif

// Unsigned weights of up to six bits. Without an instruction for it products are added in 16 bits, two sums an output
// that wrap around: what remains when they have started at `bias` fits (128 * 127 * 2 at most).
#if defined(__AVX512VNNI__)
constexpr bool kSums16 = false;
typedef vi Narrow;
PF_INLINE Narrow add_small(Narrow sums, vb w, vb x) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
}
#elif defined(__AVX2__)
constexpr bool kSums16 = true;
typedef vs Narrow;
PF_INLINE Narrow add_small(Narrow sums, vb w, vb x) { return sums + multiply(w, x); }
#else
constexpr bool kSums16 = false;
typedef vi Narrow;
PF_INLINE Narrow add_small(Narrow sums, vb w, vb x) { return add_products(sums, w, x); }
#endif

// The sums, each output's times a scale of its own: of the first or the second half of 32 inputs, of `both`.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
PF_INLINE vi widen(vs sums) { return multiply_pairs(sums, vs{} + 1); }
PF_INLINE vs scales_of(vs both, int half) {
  const vi v = (vi)both;
  return (vs)(half ? (high16(v) & 0xffff) | (v & ~0xffff) : (v & 0xffff) | v << 16);
}
PF_INLINE vi scaled(vs sums, vs scales) { return multiply_pairs(sums, scales); }
#else
PF_INLINE vi widen(vi sums) { return sums; }
PF_INLINE vi scales_of(vs both, int half) { return half ? high16((vi)both) : low16((vi)both); }
PF_INLINE vi scaled(vi sums, vi scales) { return sums * scales; }
#endif

// Signed weights. The dot-product instruction wants unsigned ones: it is given w + 128 and has started at `bias`.
#if defined(__AVX512VNNI__)
constexpr bool kSignedBias = true;
struct Signed {
  vb code;
  PF_INLINE Signed make(vb w) { return {w ^ 128}; }
  vi add(vi sums, vb x) const { return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)code, (__m512i)x); }
};
#elif defined(__AVX512F__)
constexpr bool kSignedBias = false;
struct Signed {  // |w| times x with w's sign: two products are 128 * 127 * 2 at most
  vb size;
  __mmask64 negative;
  PF_INLINE Signed make(vb w) {
    return {(vb)_mm512_abs_epi8((__m512i)w), _mm512_movepi8_mask((__m512i)w)};
  }
  vi add(vi sums, vb x) const {
    const vb turned = (vb)_mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
    return sums + widen(multiply(size, turned));
  }
};
#elif defined(__AVX2__)
constexpr bool kSignedBias = false;
struct Signed {
  vb size, w;
  PF_INLINE Signed make(vb w) { return {(vb)_mm256_abs_epi8((__m256i)w), w}; }
  vi add(vi sums, vb x) const { return sums + widen(multiply(size, (vb)_mm256_sign_epi8((__m256i)x, (__m256i)w))); }
};
#else
constexpr bool kSignedBias = false;
struct Signed {
  vb w;
  PF_INLINE Signed make(vb w) { return {w}; }
  vi add(vi sums, vb x) const { return add_products(sums, w, x); }
};
#endif

// Adds here and now: compilers would rather put all the products of a block aside, which takes many more registers.
template <class V>
PF_INLINE V at_once(V sums) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(sums));
#elif defined(__AVX2__)
  __asm__("" : "+x"(sums));
#endif
  return sums;
}

// -- prepared activations -------------------------------------------------------------------------------

struct Prepared {  // 32 activations of a row
  int8_t q[32];
  float scale;
  float offset;     // scale * float(sum of q): what a weight's minimum is multiplied with
  int32_t bias[2];  // where sums of products start, for each half (or all, in the first): -zero * (sum of q)
};

static int64_t blocks_of(int64_t k) { return (k + 31) / 32; }

static int64_t prepared_bytes_quantised(Format, int64_t k) {
  return (blocks_of(k) * int64_t(sizeof(Prepared)) + 63) / 64 * 64;
}

struct Zero {  // what a format's integers stand above their values by, and how many of them share a bias
  int value, inputs;
};

constexpr Zero zero_of(Format format) {
  switch (format) {
    case Format::q4_0: return {8, 32};
    case Format::q6_k: return {32, 16};
    case Format::int8:
    case Format::q8_0: return {kSignedBias ? 128 : 0, 32};
    default: return {0, 32};
  }
}

// max|x| of 32 values by their bits, so that no NaN gets lost: it is above infinity.
PF_INLINE float largest(const float* x) {
  vi most{};
  for (int i = 0; i < 32; i += kLanes) {
    const vi bits = as_int(abs(load(x + i)));
    most = bits > most ? bits : most;
  }
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits = most[i] > bits ? most[i] : bits;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

typedef int32_t vi4 __attribute__((vector_size(16)));

PF_INLINE vi4 column_sums(const int32_t* q) {  // of 16 in four columns
  vi4 rows[4];
  std::memcpy(rows, q, sizeof rows);
  return rows[0] + rows[1] + rows[2] + rows[3];
}

PF_INLINE int32_t bias_of(vi4 sums, int zero) {
  if (!kSums16) return -zero * (sums[0] + sums[1] + sums[2] + sums[3]);
  const int16_t both[2] = {int16_t(-zero * (sums[0] + sums[1])), int16_t(-zero * (sums[2] + sums[3]))};
  int32_t bits;
  std::memcpy(&bits, both, 4);
  return bits;
}

PF_INLINE void prepare_block(const float* x, Zero zero, Prepared& out) {
  const float most = largest(x);
  int32_t q[32] = {};
  out.scale = most < 0x1p-100f ? 0.0f : most / 127.0f;
  if (!(most < __builtin_inff())) out.scale = __builtin_nanf("");
  if (out.scale > 0) {
    const float inverse = 127.0f / most;
    for (int i = 0; i < 32; i += kLanes) {
      const vi v = to_int(round(load(x + i) * inverse));
      std::memcpy(q + i, &v, sizeof v);
    }
  }
  for (int i = 0; i < 32; ++i) out.q[i] = int8_t(q[i]);
  const vi4 first = column_sums(q), second = column_sums(q + 16), all = first + second;
  out.offset = out.scale * float(all[0] + all[1] + all[2] + all[3]);
  out.bias[0] = bias_of(zero.inputs == 16 ? first : all, zero.value);
  out.bias[1] = bias_of(second, zero.value);
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
static void prepare_rows(const PrepareArgs& args, int64_t begin, int64_t end) {
  const Zero zero = zero_of(args.format);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)args.x + row * args.stride;
    Prepared* out = (Prepared*)(args.out + row * args.out_stride);
    for (int64_t b = 0; b < blocks_of(args.k); ++b) {
      float wide[32];
      load_block(x + b * 32, args.k - b * 32, wide);
      prepare_block(wide, zero, out[b]);
    }
  }
}

static void prepare_quantised(const PrepareArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::f32) prepare_rows<float>(args, begin, end);
  else if (args.dtype == DType::bf16) prepare_rows<bf16>(args, begin, end);
  else prepare_rows<f16>(args, begin, end);
}

// -- products -------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kQuantRows = 8;  // 8 integer sums and 8 float ones of 32 registers; more is a lot of code for little
#elif defined(__AVX2__)
constexpr int kQuantRows = 4;  // 4 x 2 integer sums of 16 registers; the float ones come by once a block
#else
constexpr int kQuantRows = 2;
#endif

constexpr int64_t kAhead = 1024;  // bytes from where a weight is read to where memory is told about the next read

template <int R>
using Rows = const Prepared* [R];
template <int R>
using TileSums = vf[R][kPanelVecs];

template <int R>
PF_INLINE void start(const Rows<R>& rows, int64_t b, int half, Narrow (&dots)[R][kPanelVecs]) {
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kPanelVecs; ++i) dots[r][i] = (Narrow)set1i(rows[r][b].bias[half]);
}

// 32 nibbles of each output
template <int R>
PF_INLINE void nibble_dots(const uint8_t (*q)[64], const Rows<R>& rows, int64_t b, vi (&dots)[R][kPanelVecs]) {
  Narrow narrow[R][kPanelVecs];
  start<R>(rows, b, 0, narrow);
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    vb low[kPanelVecs], high[kPanelVecs];
    for (int i = 0; i < kPanelVecs; ++i) {
      const vb both = load_quants(q[g] + i * kLanes * 4);
      low[i] = both & 15;
      high[i] = both >> 4;
    }
    for (int r = 0; r < R; ++r) {
      const vb x = broadcast4(rows[r][b].q + 4 * g), y = broadcast4(rows[r][b].q + 4 * g + 16);
      for (int i = 0; i < kPanelVecs; ++i)
        narrow[r][i] = at_once(add_small(add_small(narrow[r][i], low[i], x), high[i], y));
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kPanelVecs; ++i) dots[r][i] = widen(narrow[r][i]);
}

// up to 32 signed bytes of each output
template <int R>
PF_INLINE void signed_dots(const uint8_t (*q)[64], int64_t groups, const Rows<R>& rows, int64_t b,
                           vi (&dots)[R][kPanelVecs]) {
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kPanelVecs; ++i) dots[r][i] = kSignedBias ? set1i(rows[r][b].bias[0]) : vi{};
#pragma GCC unroll 4
  for (int64_t g = 0; g < groups; ++g) {
    Signed w[kPanelVecs];
    for (int i = 0; i < kPanelVecs; ++i) w[i] = Signed::make(load_quants(q[g] + i * kLanes * 4));
    for (int r = 0; r < R; ++r) {
      const vb x = broadcast4(rows[r][b].q + 4 * g);
      for (int i = 0; i < kPanelVecs; ++i) dots[r][i] = at_once(w[i].add(dots[r][i], x));
    }
  }
}

template <int R>
PF_INLINE void add_scaled(const vi (&dots)[R][kPanelVecs], const vf (&d)[kPanelVecs], const Rows<R>& rows, int64_t b,
                          TileSums<R>& sums) {
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kPanelVecs; ++i)
      sums[r][i] = sums[r][i] + to_float(dots[r][i]) * (d[i] * rows[r][b].scale);
}

template <int R>
PF_INLINE void add_minima(const vf (&m)[kPanelVecs], const Rows<R>& rows, int64_t b, TileSums<R>& sums) {
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kPanelVecs; ++i) sums[r][i] = sums[r][i] + m[i] * rows[r][b].offset;
}

// A format is how a block of a panel is added to the sums of R rows, and what these are multiplied with at the end.
struct Blockwise {
  PF_INLINE vf finish(const uint8_t*, int, vf sum) { return sum; }
};

struct BlockwiseQ8_0 : Blockwise {
  template <int R>
  PF_INLINE void add(const uint8_t* panel, int64_t b, int64_t, const Rows<R>& rows, TileSums<R>& sums) {
    const PairQ8_0& pair = ((const PairQ8_0*)panel)[b / 2];
    vi dots[R][kPanelVecs];
    signed_dots<R>(pair.q[b % 2], 8, rows, b, dots);
    vf d[kPanelVecs];
    for (int i = 0; i < kPanelVecs; ++i) d[i] = half_scales(pair.d[b % 2], i);
    add_scaled<R>(dots, d, rows, b, sums);
  }
};

struct BlockwiseQ4_0 : Blockwise {
  template <int R>
  PF_INLINE void add(const uint8_t* panel, int64_t b, int64_t, const Rows<R>& rows, TileSums<R>& sums) {
    const PairQ4_0& pair = ((const PairQ4_0*)panel)[b / 2];
    vi dots[R][kPanelVecs];
    nibble_dots<R>(pair.q[b % 2], rows, b, dots);
    vf d[kPanelVecs];
    for (int i = 0; i < kPanelVecs; ++i) d[i] = half_scales(pair.d[b % 2], i);
    add_scaled<R>(dots, d, rows, b, sums);
  }
};

struct BlockwiseQ4_1 : Blockwise {
  template <int R>
  PF_INLINE void add(const uint8_t* panel, int64_t b, int64_t, const Rows<R>& rows, TileSums<R>& sums) {
    const BlockQ4_1& block = ((const BlockQ4_1*)panel)[b];
    vi dots[R][kPanelVecs];
    nibble_dots<R>(block.q, rows, b, dots);
    vf d[kPanelVecs], m[kPanelVecs];
    for (int i = 0; i < kPanelVecs; ++i) d[i] = half_scales(block.d, i), m[i] = half_scales(block.m, i);
    add_scaled<R>(dots, d, rows, b, sums);
    add_minima<R>(m, rows, b, sums);
  }
};

struct BlockwiseQ4_K : Blockwise {
  template <int R>
  PF_INLINE void add(const uint8_t* panel, int64_t b, int64_t, const Rows<R>& rows, TileSums<R>& sums) {
    const BlockQ4_K& block = ((const BlockQ4_K*)panel)[b / 8];
    const int64_t g = b % 8;
    vi dots[R][kPanelVecs];
    nibble_dots<R>(block.q[g], rows, b, dots);
    vf d[kPanelVecs], m[kPanelVecs];
    for (int i = 0; i < kPanelVecs; ++i) {
      d[i] = half_scales(block.d, i) * byte_scales(block.scale[g], i);
      m[i] = -(half_scales(block.dmin, i) * byte_scales(block.min[g], i));
    }
    add_scaled<R>(dots, d, rows, b, sums);
    add_minima<R>(m, rows, b, sums);
  }
};

struct BlockwiseQ6_K : Blockwise {
  // Half a block: low nibbles, then high ones.
  template <int R, int Half>
  PF_INLINE void half_dots(const uint8_t (*low)[64], const uint8_t (*high)[64], const Rows<R>& rows, int64_t b,
                           Narrow (&dots)[R][kPanelVecs]) {
    start<R>(rows, b, Half, dots);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      vb w[kPanelVecs];
      for (int i = 0; i < kPanelVecs; ++i) {
        const vb both = load_quants(low[g] + i * kLanes * 4);
        const vs bits = (vs)load_quants(high[g / 2] + i * kLanes * 4);
        const vs top = Half ? (g % 2 ? bits >> 2 : bits << 2) : (g % 2 ? bits : bits << 4);
        w[i] = (Half ? both >> 4 : both & 15) | ((vb)top & 48);
      }
      for (int r = 0; r < R; ++r) {
        const vb x = broadcast4(rows[r][b].q + 16 * Half + 4 * g);
        for (int i = 0; i < kPanelVecs; ++i) dots[r][i] = at_once(add_small(dots[r][i], w[i], x));
      }
    }
  }

  template <int R>
  PF_INLINE void add(const uint8_t* panel, int64_t b, int64_t, const Rows<R>& rows, TileSums<R>& sums) {
    const BlockQ6_K& block = ((const BlockQ6_K*)panel)[b / 8];
    const auto& part = block.q[b % 8];
    Narrow narrow[R][kPanelVecs];
    vi dots[R][kPanelVecs];
    vs scales[kPanelVecs];
    vf d[kPanelVecs];
    for (int i = 0; i < kPanelVecs; ++i) {
      scales[i] = signed_pairs(block.scale[b % 8], i);
      d[i] = half_scales(block.d, i);
    }
    half_dots<R, 0>(part.low, part.high, rows, b, narrow);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kPanelVecs; ++i) dots[r][i] = scaled(narrow[r][i], scales_of(scales[i], 0));
    half_dots<R, 1>(part.low, part.high, rows, b, narrow);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kPanelVecs; ++i) dots[r][i] = dots[r][i] + scaled(narrow[r][i], scales_of(scales[i], 1));
    add_scaled<R>(dots, d, rows, b, sums);
  }
};

struct BlockwiseInt8 : Blockwise {
  PF_INLINE vf finish(const uint8_t* panel, int i, vf sum) {
    return sum * load(((const PanelInt8*)panel)->scale + i * kLanes);
  }

  template <int R>
  PF_INLINE void add(const uint8_t* panel, int64_t b, int64_t k, const Rows<R>& rows, TileSums<R>& sums) {
    const uint8_t (*q)[64] = ((const PanelInt8*)panel)->q + b * 8;
    vi dots[R][kPanelVecs];
    if (k - b * 32 >= 32) signed_dots<R>(q, 8, rows, b, dots);
    else signed_dots<R>(q, (k - b * 32 + 3) / 4, rows, b, dots);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kPanelVecs; ++i) sums[r][i] = sums[r][i] + to_float(dots[r][i]) * rows[r][b].scale;
  }
};

// Integer sums of one panel at a time have the registers; float sums come by once a block.
template <class Format>
struct Quantised {
  static constexpr int kRows = kQuantRows, kPanels = 1, kWide = 4;

  template <int R, int P>
  __attribute__((noinline)) static void tile(const LinearArgs& args, const uint8_t* const (&panels)[P],
                                             const uint8_t* a, vf (&acc)[R][P][kPanelVecs]) {
    Rows<R> rows;
    for (int r = 0; r < R; ++r) rows[r] = (const Prepared*)(a + r * args.a_stride);
    TileSums<R> sums[P];
    for (int p = 0; p < P; ++p)
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < kPanelVecs; ++i) sums[p][r][i] = vf{};
    const int64_t blocks = blocks_of(args.k), bytes = args.panel_bytes / blocks;
    for (int64_t b = 0; b < blocks; ++b)
      for (int p = 0; p < P; ++p) {
        if constexpr (R <= 2) prefetch(panels[p], b * bytes + kAhead, bytes, P, args.panel_bytes);
        Format::template add<R>(panels[p], b, args.k, rows, sums[p]);
      }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < kPanelVecs; ++i) acc[r][p][i] = Format::finish(panels[p], i, sums[p][r][i]);
  }

  // What lies past a panel's end is asked for where the next tile has it: P panels follow each other in memory.
  PF_INLINE void prefetch(const uint8_t* panel, int64_t at, int64_t bytes, int64_t together, int64_t panel_bytes) {
    at += at >= panel_bytes ? (together - 1) * panel_bytes : 0;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(panel + at + line);
  }
};

using Q8_0 = Quantised<BlockwiseQ8_0>;
using Q4_0 = Quantised<BlockwiseQ4_0>;
using Q4_1 = Quantised<BlockwiseQ4_1>;
using Q4_K = Quantised<BlockwiseQ4_K>;
using Q6_K = Quantised<BlockwiseQ6_K>;
using Int8 = Quantised<BlockwiseInt8>;

// -- one row of a weight, for an embedding ----------------------------------------------------------------

PF_INLINE float half_at(const uint16_t* p, int64_t column) { return f16_to_float(p[column]); }

PF_INLINE int signed_at(const uint8_t (*q)[64], int64_t column, int64_t i) {
  return int8_t(q[i / 4][4 * column + i % 4]);
}

PF_INLINE int nibble_at(const uint8_t (*q)[64], int64_t column, int i) {  // of 32
  const uint8_t both = q[i % 16 / 4][4 * column + i % 4];
  return i < 16 ? both & 15 : both >> 4;
}

PF_INLINE int high_bits_at(const uint8_t (*q)[64], int64_t column, int i) {  // bits 4 and 5 of value i of 32
  const int group = i % 16 / 4;
  return q[group / 2][4 * column + i % 4] >> (group % 2 * 4 + i / 16 * 2) << 4 & 48;
}

// Up to 32 values from input 32 b of an output, by the operations, in their order, of the gguf library.
static void dequantise_block(Format format, const uint8_t* panel, int64_t column, int64_t b, int64_t count,
                             float* out) {
  switch (format) {
    case Format::int8: {
      const PanelInt8& all = *(const PanelInt8*)panel;
      for (int64_t i = 0; i < count; ++i) out[i] = float(signed_at(all.q, column, 32 * b + i)) * all.scale[column];
      return;
    }
    case Format::q8_0: {
      const PairQ8_0& pair = ((const PairQ8_0*)panel)[b / 2];
      const float d = half_at(pair.d[b % 2], column);
      for (int i = 0; i < 32; ++i) out[i] = float(signed_at(pair.q[b % 2], column, i)) * d;
      return;
    }
    case Format::q4_0: {
      const PairQ4_0& pair = ((const PairQ4_0*)panel)[b / 2];
      const float d = half_at(pair.d[b % 2], column);
      for (int i = 0; i < 32; ++i) out[i] = d * float(nibble_at(pair.q[b % 2], column, i) - 8);
      return;
    }
    case Format::q4_1: {
      const BlockQ4_1& block = ((const BlockQ4_1*)panel)[b];
      const float d = half_at(block.d, column), m = half_at(block.m, column);
      for (int i = 0; i < 32; ++i) out[i] = d * float(nibble_at(block.q, column, i)) + m;
      return;
    }
    case Format::q4_k: {
      const BlockQ4_K& block = ((const BlockQ4_K*)panel)[b / 8];
      const float d = half_at(block.d, column) * float(block.scale[b % 8][column]);
      const float m = half_at(block.dmin, column) * float(block.min[b % 8][column]);
      for (int i = 0; i < 32; ++i) out[i] = d * float(nibble_at(block.q[b % 8], column, i)) - m;
      return;
    }
    default: {
      const BlockQ6_K& block = ((const BlockQ6_K*)panel)[b / 8];
      const auto& part = block.q[b % 8];
      for (int i = 0; i < 32; ++i) {
        const float d = half_at(block.d, column) * float(block.scale[b % 8][column][i / 16]);
        out[i] = d * float((nibble_at(part.low, column, i) | high_bits_at(part.high, column, i)) - 32);
      }
    }
  }
}

template <class T>
static void dequantise_row(Format format, const uint8_t* panel, int64_t column, int64_t k, T* out) {
  for (int64_t b = 0; b < blocks_of(k); ++b) {
    float wide[32];
    const int64_t count = k - b * 32 < 32 ? k - b * 32 : 32;
    dequantise_block(format, panel, column, b, count, wide);
    for (int64_t i = 0; i < count; ++i) from_float(wide[i], out + b * 32 + i);
  }
}

static void gather_quantised(const GatherArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t id = args.ids[row], column = id % kPanel;
    const uint8_t* panel = args.weight + id / kPanel * args.panel_bytes;
    const int64_t at = row * args.k;
    if (args.dtype == DType::f32) dequantise_row(args.format, panel, column, args.k, (float*)args.out + at);
    else if (args.dtype == DType::bf16) dequantise_row(args.format, panel, column, args.k, (bf16*)args.out + at);
    else dequantise_row(args.format, panel, column, args.k, (f16*)args.out + at);
  }
}

}  // namespace pagefleet::PAGEFLEET_ISA
