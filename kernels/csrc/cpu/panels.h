// Where the values of quantised weights lie in a panel of 16 outputs, for who packs and who reads.
//
// A panel is a sequence of these structures along k. Values of four consecutive inputs of each output lie together,
// output after output: 64 bytes that one load brings in, with an output in each 32-bit lane. Of four-bit values such
// 64 bytes have two: group g of a block (inputs 4 g to 4 g + 3) in the low nibbles, group g + 4 in the high ones.
// Scales and minima are those of the file, fp16. All of it is in multiples of 64 bytes, so that no load straddles
// cache lines: the 32-blocks that would not be go in pairs, the second of the last pair is left out if there is none.
#pragma once

#include <cstdint>

namespace pagefleet {

struct PairQ8_0 {
  uint16_t d[2][16];
  uint8_t q[2][8][64];  // int8
};

struct PairQ4_0 {
  uint16_t d[2][16];
  uint8_t q[2][4][64];
};

struct BlockQ4_1 {
  uint16_t d[16], m[16];
  uint8_t q[4][64];
};

struct BlockQ4_K {
  uint16_t d[16], dmin[16];
  uint8_t scale[8][16], min[8][16];  // six bits, a byte each: 3 % more than in the file, nothing to take apart
  uint8_t q[8][4][64];
};

struct BlockQ6_K {
  uint16_t d[16];
  uint8_t unused[32];
  int8_t scale[8][16][2];  // of the two halves of 32 inputs
  struct {
    uint8_t low[4][64];
    uint8_t high[2][64];  // bits 4 and 5: of low[2 t] from the lowest bits group 2 t, 2 t + 4, 2 t + 1, 2 t + 5
  } q[8];
};

struct PanelInt8 {
  float scale[16];
  uint8_t q[][64];  // int8, one for every four inputs
};

static_assert(sizeof(PairQ8_0) == 1088 && sizeof(PairQ4_0) == 576 && sizeof(BlockQ4_1) == 320, "no padding");
static_assert(sizeof(BlockQ4_K) == 2368 && sizeof(BlockQ6_K) == 3392, "no padding");

}  // namespace pagefleet
