// One vector of floats, as wide as the instruction set has them: all that kernels know of a processor.
//
// vf is kLanes floats and takes + - * / and comparisons as they are (GCC and clang vector types); what has no
// operator is a function below. Everything is inline in a namespace of its instruction set, so that the linker never
// takes one unit's code for another's.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef PAGEFLEET_ISA
#error "compile isa.cpp with -DPAGEFLEET_ISA=scalar, avx2, avx512 or avx512bf16"
#endif

#define PF_INLINE static inline __attribute__((always_inline))

namespace pagefleet::PAGEFLEET_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));

constexpr int kPanelVecs = 16 / kLanes;  // vectors in a panel of 16 outputs

// -- load and store ------------------------------------------------------------------------------------

PF_INLINE vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

PF_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

PF_INLINE vf set1(float x) { return x - vf{}; }  // x + 0 would be an addition: -0 + 0 is not -0

PF_INLINE vi set1i(int32_t x) { return vi{} + x; }

PF_INLINE vf as_float(vi v) { return (vf)v; }

PF_INLINE vi as_int(vf v) { return (vi)v; }

PF_INLINE float bf16_to_float(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

PF_INLINE uint16_t float_to_bf16(float x) {  // to nearest, ties to even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

PF_INLINE float f16_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | (mantissa << 13);
  } else if (exponent) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {  // zero or subnormal: mantissa * 2^-24, exact in float32
    const float magnitude = float(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &magnitude, 4);
    bits |= sign;
  }
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

PF_INLINE uint16_t float_to_f16(float x) {  // to nearest, ties to even
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and more round to infinity
  if (bits < 0x38800000) {  // below 2^-14: adding 0.5 leaves multiples of 2^-24 in the low bits, rounded
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  const uint32_t rounded = bits + 0xfff + ((bits >> 13) & 1);
  return uint16_t(sign | ((rounded - 0x38000000) >> 13));
#endif
}

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

PF_INLINE float to_float(float x) { return x; }
PF_INLINE float to_float(bf16 x) { return bf16_to_float(x.bits); }
PF_INLINE float to_float(f16 x) { return f16_to_float(x.bits); }
PF_INLINE void from_float(float x, float* p) { *p = x; }
PF_INLINE void from_float(float x, bf16* p) { p->bits = float_to_bf16(x); }
PF_INLINE void from_float(float x, f16* p) { p->bits = float_to_f16(x); }

PF_INLINE vf load(const bf16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

PF_INLINE vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

PF_INLINE void store(bf16* p, vf v) {
  const vu bits = (vu)v;
  const vi nan = v != v;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu result = (((vu)nan) & ((bits >> 16) | 0x40)) | (~(vu)nan & rounded);
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)result));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)result, (__m256i)result);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  for (int i = 0; i < kLanes; ++i) p[i].bits = uint16_t(result[i]);
#endif
}

PF_INLINE void store(f16* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#else
  for (int i = 0; i < kLanes; ++i) from_float(v[i], p + i);
#endif
}

// The first n < kLanes elements, the others 0; and back.
template <class T>
PF_INLINE vf load_some(const T* p, int n) {
  float wide[kLanes] = {};
  for (int i = 0; i < n; ++i) wide[i] = to_float(p[i]);
  return load(wide);
}

template <class T>
PF_INLINE void store_some(T* p, vf v, int n) {
  for (int i = 0; i < n; ++i) from_float(v[i], p + i);
}

// -- arithmetic ----------------------------------------------------------------------------------------

PF_INLINE vf fma(vf a, vf b, vf c) {  // a * b + c, rounded once where the processor can
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

PF_INLINE vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

PF_INLINE bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

PF_INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}

PF_INLINE vf min(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return select(a < b, a, b);
#endif
}

PF_INLINE vf abs(vf a) { return (vf)((vi)a & 0x7fffffff); }

PF_INLINE vf round(vf a) {  // to nearest, ties to even; |a| < 2^22
  const vf magic = set1(12582912.0f);
  return (a + magic) - magic;
}

PF_INLINE vf to_float(vi a) { return __builtin_convertvector(a, vf); }

PF_INLINE vi to_int(vf a) { return __builtin_convertvector(a, vi); }  // towards zero

// The sum of 16 numbers, in the order that every instruction set can do: halves are added to halves.
PF_INLINE float sum16(const float* p) {
  float h[8];
  for (int i = 0; i < 8; ++i) h[i] = p[i] + p[i + 8];
  for (int i = 0; i < 4; ++i) h[i] += h[i + 4];
  for (int i = 0; i < 2; ++i) h[i] += h[i + 2];
  return h[0] + h[1];
}

// e^x to 1 ulp or so; 0 from -87.4 down (and for -infinity), infinity from 88.8 up, NaN for NaN.
// exp(x) = 2^n * p(r), x = n ln 2 + r; p from Cephes' expf, http://www.netlib.org/cephes/
PF_INLINE vf exp(vf x) {
  const vf clamped = min(max(x, set1(-87.4f)), set1(88.8f));
  const vf n = round(clamped * 1.44269504088896341f);
  vf r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  // 2^n in two factors, for n = 128 and n = -126 both
  const vi half = to_int(n) >> 1;
  const vf low = as_float((half + 127) << 23), high = as_float((to_int(n) - half + 127) << 23);
  const vf result = p * low * high;
  return select(x != x, x, select(x < set1(-87.4f), vf{}, select(x > set1(88.8f), set1(__builtin_inff()), result)));
}

PF_INLINE vf tanh(vf x) {  // 1 - 2 / (e^2x + 1); small arguments by their series, where that would cancel
  const vf square = x * x;
  const vf small = x * fma(square, fma(square, set1(2.0f / 15), set1(-1.0f / 3)), set1(1.0f));
  return select(abs(x) < set1(0.05f), small, 1.0f - 2.0f / (exp(x + x) + 1.0f));
}

// Complementary error function's companion: erf to 1.2e-7, by W. J. Cody's style of Numerical Recipes' erfc fit.
PF_INLINE vf erf(vf x) {
  const vf z = abs(x), t = 1.0f / (1.0f + 0.5f * z);
  vf p = set1(0.17087277f);
  p = fma(p, t, set1(-0.82215223f));
  p = fma(p, t, set1(1.48851587f));
  p = fma(p, t, set1(-1.13520398f));
  p = fma(p, t, set1(0.27886807f));
  p = fma(p, t, set1(-0.18628806f));
  p = fma(p, t, set1(0.09678418f));
  p = fma(p, t, set1(0.37409196f));
  p = fma(p, t, set1(1.00002368f));
  p = fma(p, t, set1(-1.26551223f));
  const vf complement = t * exp(fma(-z, z, p));
  const vf magnitude = 1.0f - complement;
  return select(x < vf{}, -magnitude, magnitude);
}

}  // namespace pagefleet::PAGEFLEET_ISA
