// Between the projections and attention: a token's query and key heads are normalised (if the model does) and turned,
// its keys and values go to their slots of the paged cache. A head passes through float32 and is rounded once.
#pragma once

#include "norm.h"

namespace pagefleet::PAGEFLEET_ISA {

PF_INLINE void load_head(const void* x, DType dtype, int64_t at, int64_t n, float* head) {
  for (int64_t i = 0; i < n; i += 16) {
    Wide wide;
    if (dtype == DType::f32) wide = load_wide((const float*)x + at + i, n - i);
    else if (dtype == DType::bf16) wide = load_wide((const bf16*)x + at + i, n - i);
    else wide = load_wide((const f16*)x + at + i, n - i);
    store_wide(head + i, wide, n - i);
  }
}

PF_INLINE void store_head(void* out, DType dtype, int64_t at, int64_t n, const float* head) {
  for (int64_t i = 0; i < n; i += 16) {
    const Wide wide = load_wide(head + i, n - i);
    if (dtype == DType::f32) store_wide((float*)out + at + i, wide, n - i);
    else if (dtype == DType::bf16) store_wide((bf16*)out + at + i, wide, n - i);
    else store_wide((f16*)out + at + i, wide, n - i);
  }
}

PF_INLINE void norm_head(float* head, const float* weight, int64_t n, float eps) {
  if (!weight) return;
  const vf scale = set1(inverse_root(squares_of(head, n, 0.0f), n, eps));
  for (int64_t i = 0; i < n; i += 16) {
    Wide a = load_wide(head + i, n - i);
    const Wide w = load_wide(weight + i, n - i);
    for (int j = 0; j < kPanelVecs; ++j) a.v[j] = a.v[j] * scale * w.v[j];
    store_wide(head + i, a, n - i);
  }
}

// x * cos + other * sin, where other[i] is the partner of x[i]; "sin" has the sign that its place needs.
PF_INLINE void turn(const float* x, const float* other, const float* cos, const float* sin, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    Wide a = load_wide(x + i, n - i);
    const Wide b = load_wide(other + i, n - i), c = load_wide(cos + i, n - i), s = load_wide(sin + i, n - i);
    for (int j = 0; j < kPanelVecs; ++j) a.v[j] = fma(a.v[j], c.v[j], b.v[j] * s.v[j]);
    store_wide(out + i, a, n - i);
  }
}

// The first rotary_dim elements of a head. Interleaved pairs are put apart, turned, and put together again.
PF_INLINE void turn_head(float* head, const float* cos_sin, int64_t rotary_dim, bool interleaved) {
  const float *cos = cos_sin, *sin = cos_sin + rotary_dim;
  const int64_t half = rotary_dim / 2;
  float x[kMaxHeadDim], out[kMaxHeadDim];
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) x[i] = head[2 * i], x[half + i] = head[2 * i + 1];
  } else {
    std::memcpy(x, head, rotary_dim * 4);
  }
  turn(x, x + half, cos, sin, half, out);
  turn(x + half, x, cos + half, sin + half, half, out + half);
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) head[2 * i] = out[i], head[2 * i + 1] = out[half + i];
  } else {
    std::memcpy(head, out, rotary_dim * 4);
  }
}

// One scale a head: its largest magnitude becomes 127.
PF_INLINE void store_int8(uint8_t* out, const float* head, int64_t n) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float magnitude = __builtin_fabsf(head[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool empty = largest < 1e-30f;  // all zeros, or so near that 127 / largest is no number
  const float scale = empty ? 0.0f : largest / 127.0f;
  const vf inverse = set1(empty ? 0.0f : 127.0f / largest);
  for (int64_t i = 0; i < n; i += 16) {
    Wide wide = load_wide(head + i, n - i);
    for (int j = 0; j < kPanelVecs; ++j)
      wide.v[j] = round(min(max(wide.v[j] * inverse, set1(-127.0f)), set1(127.0f)));
    float rounded[16];
    store_wide(rounded, wide, 16);
    for (int64_t j = 0; j < 16 && i + j < n; ++j) out[i + j] = uint8_t(int8_t(int32_t(rounded[j])));
  }
  std::memcpy(out + n, &scale, 4);
}

PF_INLINE void store_key(const RopeArgs& args, uint8_t* row, const float* head) {
  if (args.kv_dtype == DType::i8) store_int8(row, head, args.head_dim);
  else store_head(row, args.kv_dtype, 0, args.head_dim, head);
}

static void rope_token(const RopeArgs& args, int64_t token) {
  const int64_t n = args.head_dim, at = token * args.stride, slot = args.slots[token];
  const float* cos_sin = args.rotary ? args.rotary + token * 2 * args.rotary_dim : nullptr;
  float head[kMaxHeadDim];
  for (int64_t h = 0; h < args.heads; ++h) {
    load_head(args.qkv, args.dtype, at + h * n, n, head);
    norm_head(head, args.q_norm, n, args.eps);
    if (cos_sin) turn_head(head, cos_sin, args.rotary_dim, args.interleaved);
    store_head(args.q, args.dtype, (token * args.heads + h) * n, n, head);
  }
  if (slot < 0) return;
  const int64_t block = slot / args.block_size, offset = slot % args.block_size;
  for (int64_t h = 0; h < args.kv_heads; ++h) {
    const int64_t row = ((block * args.kv_heads + h) * args.block_size + offset) * args.row_bytes;
    load_head(args.qkv, args.dtype, at + (args.heads + h) * n, n, head);
    norm_head(head, args.k_norm, n, args.eps);
    if (cos_sin) turn_head(head, cos_sin, args.rotary_dim, args.interleaved);
    store_key(args, args.keys + row, head);
    load_head(args.qkv, args.dtype, at + (args.heads + args.kv_heads + h) * n, n, head);
    store_key(args, args.values + row, head);
  }
}

static void rope_tokens(const RopeArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) rope_token(args, token);
}

}  // namespace pagefleet::PAGEFLEET_ISA
