// Weights as files have them, row after row, into panels of 16 outputs: the same bits in the order that the kernels
// (dense.h, quantised.h) read them. The ggml types' own layouts: ggml-quants in https://github.com/ggml-org/ggml
#include <cstring>

#include "kernels.h"
#include "panels.h"

namespace pagefleet {
namespace {

// One output's blocks, into column `c` of a panel that is all zeros.

void put_groups(const uint8_t* q, int64_t count, int c, uint8_t (*out)[64]) {  // bytes, four inputs together
  for (int64_t i = 0; i < count; i += 4) std::memcpy(out[i / 4] + 4 * c, q + i, count - i < 4 ? count - i : 4);
}

void put_nibbles(const uint8_t (&q)[32], int c, uint8_t (*out)[64]) {
  uint8_t both[16];
  for (int i = 0; i < 16; ++i) both[i] = uint8_t((q[i] & 15) | (q[i + 16] << 4));
  put_groups(both, 16, c, out);
}

void put(const uint8_t* row, int64_t block, int c, PairQ8_0* out) {
  std::memcpy(&out[block / 2].d[block % 2][c], row, 2);
  put_groups(row + 2, 32, c, out[block / 2].q[block % 2]);
}

void put(const uint8_t* row, int64_t block, int c, PairQ4_0* out) {  // a file's nibbles are as far apart as a panel's
  std::memcpy(&out[block / 2].d[block % 2][c], row, 2);
  put_groups(row + 2, 16, c, out[block / 2].q[block % 2]);
}

void put(const uint8_t* row, int64_t block, int c, BlockQ4_1* out) {
  std::memcpy(&out[block].d[c], row, 2);
  std::memcpy(&out[block].m[c], row + 2, 2);
  put_groups(row + 4, 16, c, out[block].q);
}

void put(const uint8_t* row, int64_t block, int c, BlockQ4_K* out) {
  BlockQ4_K& to = out[block];
  std::memcpy(&to.d[c], row, 2);
  std::memcpy(&to.dmin[c], row + 2, 2);
  const uint8_t* codes = row + 4;
  for (int i = 0; i < 4; ++i) {
    to.scale[i][c] = codes[i] & 63;
    to.min[i][c] = codes[4 + i] & 63;
    to.scale[4 + i][c] = uint8_t((codes[8 + i] & 15) | (codes[i] >> 6 << 4));
    to.min[4 + i][c] = uint8_t((codes[8 + i] >> 4) | (codes[4 + i] >> 6 << 4));
  }
  for (int g = 0; g < 8; ++g) {
    uint8_t q[32];
    for (int i = 0; i < 32; ++i) q[i] = uint8_t(row[16 + g / 2 * 32 + i] >> (g % 2 * 4)) & 15;
    put_nibbles(q, c, to.q[g]);
  }
}

void put(const uint8_t* row, int64_t block, int c, BlockQ6_K* out) {
  BlockQ6_K& to = out[block];
  std::memcpy(&to.d[c], row + 208, 2);
  for (int g = 0; g < 8; ++g) {
    const int half = g / 4, quarter = g % 4;  // 128 inputs have 64 bytes of low nibbles and 32 of high bits
    std::memcpy(to.scale[g][c], row + 192 + 2 * g, 2);
    const uint8_t* low = row + half * 64 + quarter % 2 * 32;
    const uint8_t* high = row + 128 + half * 32;
    uint8_t q[32], top[16];
    for (int i = 0; i < 32; ++i) q[i] = uint8_t(low[i] >> (quarter / 2 * 4)) & 15;
    put_nibbles(q, c, to.q[g].low);
    for (int i = 0; i < 16; ++i)
      top[i] = uint8_t(((high[i] >> (2 * quarter)) & 3) | (((high[16 + i] >> (2 * quarter)) & 3) << 2));
    for (int i = 0; i < 8; ++i)
      to.q[g].high[i / 4][4 * c + i % 4] = uint8_t(top[i / 4 * 8 + i % 4] | (top[i / 4 * 8 + 4 + i % 4] << 4));
  }
}

template <class To>
void pack_blocks(const uint8_t* row, int64_t blocks, int64_t bytes, int c, uint8_t* panel) {
  for (int64_t b = 0; b < blocks; ++b) put(row + b * bytes, b, c, reinterpret_cast<To*>(panel));
}

void pack_int8(const uint8_t* row, int64_t k, int c, uint8_t* panel) {
  PanelInt8* out = reinterpret_cast<PanelInt8*>(panel);
  std::memcpy(&out->scale[c], row, 4);
  put_groups(row + 4, k, c, out->q);
}

template <class T, int64_t Together>
void pack_dense(const uint8_t* row, int64_t k, int c, uint8_t* panel) {
  T* out = reinterpret_cast<T*>(panel) + c * Together;
  for (int64_t i = 0; i < k; ++i)
    std::memcpy(out + i / Together * 16 * Together + i % Together, row + i * sizeof(T), sizeof(T));
}

void pack_column(Format format, const uint8_t* row, int64_t k, int c, uint8_t* panel) {
  switch (format) {
    case Format::f32: return pack_dense<float, 1>(row, k, c, panel);
    case Format::f16: return pack_dense<uint16_t, 1>(row, k, c, panel);
    case Format::bf16: return pack_dense<uint16_t, 2>(row, k, c, panel);
    case Format::int8: return pack_int8(row, k, c, panel);
    case Format::q8_0: return pack_blocks<PairQ8_0>(row, k / 32, 34, c, panel);
    case Format::q4_0: return pack_blocks<PairQ4_0>(row, k / 32, 18, c, panel);
    case Format::q4_1: return pack_blocks<BlockQ4_1>(row, k / 32, 20, c, panel);
    case Format::q4_k: return pack_blocks<BlockQ4_K>(row, k / 256, 144, c, panel);
    case Format::q6_k: return pack_blocks<BlockQ6_K>(row, k / 256, 210, c, panel);
  }
}

// Bytes of `blocks` 32-blocks that lie in pairs; the first of a pair is before the second, in each member.
template <class Pair>
int64_t paired_bytes(int64_t blocks) {
  return blocks / 2 * int64_t(sizeof(Pair)) + blocks % 2 * int64_t(64 + sizeof(Pair::q) / 2);
}

}  // namespace

int64_t row_bytes(Format format, int64_t k) {
  if (k <= 0) return 0;
  const int64_t block = format < Format::q8_0 ? 1 : format < Format::q4_k ? 32 : 256;
  if (k % block) return 0;
  switch (format) {
    case Format::f32: return k * 4;
    case Format::bf16:
    case Format::f16: return k * 2;
    case Format::int8: return 4 + k;
    case Format::q8_0: return k / 32 * 34;
    case Format::q4_0: return k / 32 * 18;
    case Format::q4_1: return k / 32 * 20;
    case Format::q4_k: return k / 256 * 144;
    case Format::q6_k: return k / 256 * 210;
  }
  return 0;
}

int64_t panel_bytes(Format format, int64_t k) {
  switch (format) {
    case Format::f32: return k * 64;
    case Format::bf16:
    case Format::f16: return (k + 1) / 2 * 64;
    case Format::int8: return 64 + (k + 3) / 4 * 64;
    case Format::q8_0: return paired_bytes<PairQ8_0>(k / 32);
    case Format::q4_0: return paired_bytes<PairQ4_0>(k / 32);
    case Format::q4_1: return k / 32 * int64_t(sizeof(BlockQ4_1));
    case Format::q4_k: return k / 256 * int64_t(sizeof(BlockQ4_K));
    case Format::q6_k: return k / 256 * int64_t(sizeof(BlockQ6_K));
  }
  return 0;
}

void pack(Format format, const uint8_t* rows, int64_t n, int64_t k, uint8_t* packed, int64_t begin, int64_t end) {
  const int64_t bytes = row_bytes(format, k), panel = panel_bytes(format, k);
  for (int64_t p = begin; p < end; ++p) {
    std::memset(packed + p * panel, 0, panel);
    for (int64_t row = p * kPanel; row < n && row < (p + 1) * kPanel; ++row)
      pack_column(format, rows + row * bytes, k, int(row - p * kPanel), packed + p * panel);
  }
}

}  // namespace pagefleet
