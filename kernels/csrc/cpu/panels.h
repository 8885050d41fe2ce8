// Where things lie in a panel of 16 outputs, for who packs and who reads. A block of 32 inputs (Q*_0, Q4_1) or 256
// (K-quants) has as many bytes as in the file: 16 scales (fp16) first, then what the format has beside them, then
// values, four inputs of each output together: 64 bytes that one load brings in.
#pragma once

#include <cstdint>

namespace pagefleet {

constexpr int64_t kQ8Bytes = 544, kQ8Quants = 32;                     // 16 scales; 8 x 64 int8
constexpr int64_t kQ40Bytes = 288, kQ40Quants = 32;                   // 16 scales; 4 x 64 pairs of nibbles
constexpr int64_t kQ41Bytes = 320, kQ41Mins = 32, kQ41Quants = 64;    // 16 scales, 16 minima; 4 x 64 pairs of nibbles
constexpr int64_t kQ4KBytes = 2304, kQ4KMins = 32, kQ4KScales = 64;   // 16 scales, 16 of minima; 12 x 16 six-bit codes
constexpr int64_t kQ4KQuants = 256;                                   // 8 x 4 x 64 pairs of nibbles
constexpr int64_t kQ6KBytes = 3360, kQ6KScales = 32, kQ6KLow = 288;   // 16 scales; 16 x 16 int8; 8 x 4 x 64 nibbles
constexpr int64_t kQ6KHigh = 2336;                                    // 8 x 2 x 64 bytes of four two-bit values
constexpr int64_t kInt8Quants = 64;                                   // 16 float32 scales; then 64 for 4 inputs

}  // namespace pagefleet
