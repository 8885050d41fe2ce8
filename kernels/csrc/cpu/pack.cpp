// Weights as files have them, row after row, into panels of 16 outputs: the same bits in the order that the kernels
// (dense.h, quantised.h) read them. The ggml types' own layouts: ggml-quants in https://github.com/ggml-org/ggml
#include <cstring>

#include "kernels.h"
#include "panels.h"

namespace pagefleet {
namespace {

struct Shape {
  int64_t inputs, bytes;  // of a row's block
};

Shape block_of(Format format) {
  switch (format) {
    case Format::f32: return {1, 4};
    case Format::bf16:
    case Format::f16: return {1, 2};
    case Format::q8_0: return {32, 34};
    case Format::q4_0: return {32, 18};
    case Format::q4_1: return {32, 20};
    case Format::q4_k: return {256, 144};
    case Format::q6_k: return {256, 210};
    default: return {1, 1};
  }
}

// Four-bit values of 16 outputs, 32 inputs each: byte i of output c in vector v has input 8 v + i low, 8 v + 4 + i high.
void put_nibbles(const uint8_t (&q)[16][32], uint8_t* out) {
  for (int v = 0; v < 4; ++v)
    for (int c = 0; c < 16; ++c)
      for (int i = 0; i < 4; ++i) out[v * 64 + c * 4 + i] = uint8_t((q[c][8 * v + i] & 15) | (q[c][8 * v + 4 + i] << 4));
}

// `rows[c]`: where output c has the block; null: past the last output, zeros.
struct Block {
  const uint8_t* rows[16];

  void copy(int64_t from, int64_t bytes, uint8_t* out) const {  // so many bytes of each output, next to each other
    for (int c = 0; c < 16; ++c)
      if (rows[c]) std::memcpy(out + c * bytes, rows[c] + from, bytes);
      else std::memset(out + c * bytes, 0, bytes);
  }
};

void pack_q8_0(const Block& block, uint8_t* out) {
  block.copy(0, 2, out);
  for (int g = 0; g < 8; ++g) block.copy(2 + 4 * g, 4, out + kQ8Quants + g * 64);
}

void pack_q4(const Block& block, int64_t header, uint8_t* out) {  // header: scale, or scale and minimum
  for (int64_t at = 0; at < header; at += 2) block.copy(at, 2, out + at * 16);
  uint8_t q[16][32] = {};
  for (int c = 0; c < 16; ++c)
    if (block.rows[c])
      for (int i = 0; i < 32; ++i) q[c][i] = uint8_t(block.rows[c][header + i % 16] >> (i < 16 ? 0 : 4)) & 15;
  put_nibbles(q, out + header * 16);
}

void pack_q4_k(const Block& block, uint8_t* out) {
  block.copy(0, 2, out);
  block.copy(2, 2, out + 32);
  for (int i = 0; i < 12; ++i) block.copy(4 + i, 1, out + kQ4KScales + i * 16);
  for (int sub = 0; sub < 8; ++sub) {
    uint8_t q[16][32] = {};
    for (int c = 0; c < 16; ++c)
      if (block.rows[c])
        for (int i = 0; i < 32; ++i) q[c][i] = uint8_t(block.rows[c][16 + sub / 2 * 32 + i] >> (sub % 2 * 4)) & 15;
    put_nibbles(q, out + kQ4KQuants + sub * 256);
  }
}

uint8_t six_bits(const uint8_t* row, int i) {  // value i of a Q6_K block
  const int half = i / 128, l = i % 32, quarter = i % 128 / 32;
  const uint8_t low = row[half * 64 + l + (quarter % 2) * 32], high = row[128 + half * 32 + l];
  return uint8_t(((quarter < 2 ? low : low >> 4) & 15) | (((high >> (2 * quarter)) & 3) << 4));
}

void pack_q6_k(const Block& block, uint8_t* out) {
  block.copy(208, 2, out);
  for (int i = 0; i < 16; ++i) block.copy(192 + i, 1, out + kQ6KScales + i * 16);
  for (int g = 0; g < 8; ++g) {
    uint8_t q[16][32] = {};
    for (int c = 0; c < 16; ++c)
      if (block.rows[c])
        for (int i = 0; i < 32; ++i) q[c][i] = six_bits(block.rows[c], g * 32 + i);
    put_nibbles(q, out + kQ6KLow + g * 256);
    uint8_t* high = out + kQ6KHigh + g * 128;  // byte i of output c in vector v: inputs 16 v + 4 t + i at bits 2 t
    std::memset(high, 0, 128);
    for (int v = 0; v < 2; ++v)
      for (int c = 0; c < 16; ++c)
        for (int i = 0; i < 4; ++i)
          for (int t = 0; t < 4; ++t) high[v * 64 + c * 4 + i] |= uint8_t((q[c][16 * v + 4 * t + i] >> 4) << (2 * t));
  }
}

template <class T>
void pack_plain(const uint8_t* const (&rows)[16], int64_t k, T* out) {
  for (int c = 0; c < 16; ++c)
    for (int64_t i = 0; i < k; ++i) {
      if (rows[c]) std::memcpy(out + i * 16 + c, rows[c] + i * sizeof(T), sizeof(T));
      else out[i * 16 + c] = T{};
    }
}

void pack_pairs(const uint8_t* const (&rows)[16], int64_t k, uint16_t* out) {
  std::memset(out, 0, (k + 1) / 2 * 64);
  for (int c = 0; c < 16; ++c)
    for (int64_t i = 0; rows[c] && i < k; ++i) std::memcpy(out + (i / 2 * 16 + c) * 2 + i % 2, rows[c] + i * 2, 2);
}

void pack_int8(const uint8_t* const (&rows)[16], int64_t k, uint8_t* out) {
  std::memset(out, 0, 64 + (k + 3) / 4 * 64);
  for (int c = 0; c < 16; ++c) {
    if (!rows[c]) continue;
    std::memcpy(out + c * 4, rows[c], 4);
    for (int64_t i = 0; i < k; ++i) out[64 + i / 4 * 64 + c * 4 + i % 4] = rows[c][4 + i];
  }
}

void pack_panel(Format format, const uint8_t* const (&rows)[16], int64_t k, uint8_t* out) {
  if (format == Format::f32) return pack_plain(rows, k, reinterpret_cast<uint32_t*>(out));
  if (format == Format::f16) return pack_plain(rows, k, reinterpret_cast<uint16_t*>(out));
  if (format == Format::bf16) return pack_pairs(rows, k, reinterpret_cast<uint16_t*>(out));
  if (format == Format::int8) return pack_int8(rows, k, out);
  const Shape shape = block_of(format);
  for (int64_t b = 0; b < k / shape.inputs; ++b) {
    Block block;
    for (int c = 0; c < 16; ++c) block.rows[c] = rows[c] ? rows[c] + b * shape.bytes : nullptr;
    uint8_t* to = out + b * shape.bytes * 16;
    if (format == Format::q8_0) pack_q8_0(block, to);
    else if (format == Format::q4_0) pack_q4(block, 2, to);
    else if (format == Format::q4_1) pack_q4(block, 4, to);
    else if (format == Format::q4_k) pack_q4_k(block, to);
    else pack_q6_k(block, to);
  }
}

}  // namespace

int64_t row_bytes(Format format, int64_t k) {
  const Shape shape = block_of(format);
  if (k <= 0 || k % shape.inputs) return 0;
  if (format == Format::int8) return 4 + k;
  return k / shape.inputs * shape.bytes;
}

int64_t panel_bytes(Format format, int64_t k) {
  if (format == Format::bf16) return (k + 1) / 2 * 64;
  if (format == Format::int8) return 64 + (k + 3) / 4 * 64;
  return row_bytes(format, k) * 16;
}

void pack(Format format, const uint8_t* rows, int64_t n, int64_t k, uint8_t* packed, int64_t begin, int64_t end) {
  const int64_t bytes = row_bytes(format, k);
  for (int64_t panel = begin; panel < end; ++panel) {
    const uint8_t* outputs[16];
    for (int64_t c = 0; c < 16; ++c) outputs[c] = panel * 16 + c < n ? rows + (panel * 16 + c) * bytes : nullptr;
    pack_panel(format, outputs, k, packed + panel * panel_bytes(format, k));
  }
}

}  // namespace pagefleet
