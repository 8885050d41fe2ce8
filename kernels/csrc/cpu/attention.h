// Causal attention over paged keys.
//
// The query heads that share a key head, times the query tokens of an item, are the rows of its products. Keys come in
// tiles of 64 at absolute positions; a tile's scores, softmax and weighted values are made for all rows before the
// next. Every 512 keys, a part, (maximum, sum, weighted values) start afresh, and the parts are merged in order by one
// function, here or in merge_items. Hence a query's result has the same bits whatever is computed beside it, and
// wherever the work is cut: a sum runs over the head's dimensions, or over the keys of a part, one after another.
//
// A hidden key gets the score -infinity and the weight 0; a tile, or a run of keys, that no row sees is left out, which
// changes nothing: the maximum stays, old sums are multiplied by exp(0) = 1, and 0 is added.
//
// Few rows (decoding) read keys straight from the cache, transposing them in registers. Many rows (prefill) share a
// tile's keys, transposed, and values in float32.
#pragma once

#include "rope.h"

namespace pagefleet::PAGEFLEET_ISA {

constexpr int64_t kTile = 64;  // keys
constexpr int64_t kGroup = 16;  // keys whose rows lie at one stride
constexpr int64_t kGroups = kTile / kGroup;
constexpr int64_t kTileVecs = kTile / kLanes;
constexpr int64_t kRowsAtOnce = 128;  // rows whose queries and sums stay in the second-level cache
constexpr int64_t kValuePanel = kTile * 16 + 16;  // floats; the 16 keep panels off each other's cache sets
constexpr float kHidden = -__builtin_inff();

#if defined(__AVX512F__)
constexpr int kProductRows = 12, kProductPanels = 2;  // 24 accumulators of 32 registers
constexpr int kDirectRows = 6, kDirectLimit = 6;
constexpr int direct_vecs(int rows) { return rows <= 5 ? 4 : 2; }
constexpr int direct_columns(int rows) { return rows <= 4 ? 4 : 2; }
#elif defined(__AVX2__)
constexpr int kProductRows = 6, kProductPanels = 1;  // 12 accumulators of 16 registers
constexpr int kDirectRows = 6, kDirectLimit = 6;
constexpr int direct_vecs(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
constexpr int direct_columns(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
constexpr int kProductRows = 2, kProductPanels = 1;
constexpr int kDirectRows = 2, kDirectLimit = 4;
constexpr int direct_vecs(int) { return 1; }
constexpr int direct_columns(int) { return 1; }
#endif

PF_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
PF_INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
PF_INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

struct Range {
  int64_t begin, end;
};

struct Sums {  // of each row, over the keys so far
  float* maximum;  // of the scores
  float* sum;      // of exp(score - maximum)
  float* values;   // [rows, dim] weighted by that
};

// Where the rows of a tile's 4 groups lie: in the cache, or copied where a group is cut by the end of a block.
struct Groups {
  const uint8_t* rows[kGroups];
  int64_t stride[kGroups];
  float* scales;  // int8: [kTile]
};

struct i8 {
  int8_t value;
};

// What a thread works on: some tokens' queries of one key head.
struct Work {
  const AttentionArgs* args;
  int64_t row, kv_head;
  int64_t first_token, tokens, first_position;
  int64_t heads;  // query heads of the key head
  int64_t rows;   // tokens * heads
  int64_t dim;    // head_dim, padded to whole vectors
  float *q, *scores, *factors, *tile_sums;  // [rows, dim], [rows, kTile], [rows], [rows]
  Sums part, total;
  Groups keys, values;
  const uint8_t* next_keys[kGroups];  // where the next tile's probably are, to be fetched meanwhile
  uint8_t *key_copies, *value_copies;
  int64_t copy_stride;
  float* key_panels;    // [kGroups, dim, kGroup]
  float* value_panels;  // [dim / 16, kTile, 16], kValuePanel apart
};

// -- scratch -------------------------------------------------------------------------------------------

PF_INLINE int64_t most_rows(int64_t heads) { return at_least(kRowsAtOnce, heads); }

// Lays the arrays out; with a null `memory` it only counts their bytes.
static int64_t lay_out(const AttentionArgs& args, uint8_t* memory, Work& work) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    uint8_t* p = memory ? memory + used : nullptr;
    used += round_up(bytes, 64);
    return p;
  };
  const auto floats = [&](int64_t count) { return (float*)take(count * 4); };
  work.args = &args;
  work.heads = args.heads / args.kv_heads;
  work.dim = round_up(args.head_dim, 16);
  work.copy_stride = round_up(work.dim * size_of(args.kv_dtype), 16);
  const int64_t rows = round_up(most_rows(work.heads), 16);
  work.q = floats(rows * work.dim);
  work.scores = floats(rows * kTile);
  work.factors = floats(rows);
  work.tile_sums = floats(rows);
  work.part = {floats(rows), floats(rows), floats(rows * work.dim)};
  work.total = {floats(rows), floats(rows), floats(rows * work.dim)};
  work.keys.scales = floats(kTile);
  work.values.scales = floats(kTile);
  work.key_copies = take(kTile * work.copy_stride);
  work.value_copies = take(kTile * work.copy_stride);
  work.key_panels = floats(kTile * work.dim);
  work.value_panels = floats(work.dim / 16 * kValuePanel);
  return used;
}

static int64_t attention_scratch(const AttentionArgs& args) {
  Work work;
  return lay_out(args, nullptr, work);
}

// -- who sees what -------------------------------------------------------------------------------------

PF_INLINE Range seen_by_token(const Work& work, int64_t token) {
  const int64_t position = work.first_position + token, window = work.args->window;
  return {window ? at_least(position - window + 1, 0) : 0, at_least(position + 1, 0)};
}

// Of a tile, the keys that any of `count` rows sees; token by token both ends only rise.
PF_INLINE Range seen_of_tile(const Work& work, int64_t tile, int64_t row, int64_t count) {
  const int64_t begin = seen_by_token(work, row / work.heads).begin;
  const int64_t end = seen_by_token(work, (row + count - 1) / work.heads).end;
  return {at_least(begin - tile, 0), at_most(end - tile, kTile)};
}

// -- keys and values in the cache ----------------------------------------------------------------------

PF_INLINE int64_t row_offset(const Work& work, int64_t position) {
  const AttentionArgs& args = *work.args;
  const int32_t block = args.block_tables[work.row * args.table_stride + position / args.block_size];
  return ((block * args.kv_heads + work.kv_head) * args.block_size + position % args.block_size) * args.row_bytes;
}

// Only keys that the work sees are copied: the others may lie in blocks that are someone else's by now.
static void copy_group(const Work& work, const uint8_t* cache, Range seen, int64_t start, uint8_t* copies) {
  const int64_t bytes = work.args->head_dim * size_of(work.args->kv_dtype);
  for (int64_t i = 0; i < kGroup; ++i, copies += work.copy_stride) {
    const bool visible = start + i >= seen.begin && start + i < seen.end;
    if (visible) std::memcpy(copies, cache + row_offset(work, start + i), bytes);
    const int64_t filled = visible ? bytes : 0;
    std::memset(copies + filled, 0, work.copy_stride - filled);
  }
}

static void read_scales(const Work& work, const uint8_t* cache, Range seen, int64_t tile, float* scales) {
  if (work.args->kv_dtype != DType::i8) return;
  const int64_t block_size = work.args->block_size, row_bytes = work.args->row_bytes;
  for (int64_t i = 0; i < kTile;) {
    const int64_t position = tile + i;
    if (position < seen.begin || position >= seen.end) {
      scales[i++] = 0;
      continue;
    }
    const uint8_t* scale = cache + row_offset(work, position) + work.args->head_dim;
    const int64_t left = at_most(block_size - position % block_size, at_most(seen.end - position, kTile - i));
    for (int64_t j = 0; j < left; ++j) std::memcpy(scales + i + j, scale + j * row_bytes, 4);
    i += left;
  }
}

// A group within one block is read where it is, hidden keys and all: their scores are thrown away, their values left
// out. A group that nobody sees is nowhere.
static void locate(const Work& work, const uint8_t* cache, Range seen, int64_t tile, uint8_t* copies, Groups& groups) {
  const AttentionArgs& args = *work.args;
  for (int64_t g = 0; g < kGroups; ++g, copies += kGroup * work.copy_stride) {
    const int64_t start = tile + g * kGroup;
    groups.rows[g] = copies;
    groups.stride[g] = work.copy_stride;
    if (start >= seen.end || start + kGroup <= seen.begin) continue;
    if (args.head_dim % 16 == 0 && start % args.block_size + kGroup <= args.block_size) {
      groups.rows[g] = cache + row_offset(work, start);
      groups.stride[g] = args.row_bytes;
    } else {
      copy_group(work, cache, seen, start, copies);
    }
  }
}

static void look_ahead(Work& work, Range seen, int64_t tile) {
  for (int64_t g = 0; g < kGroups; ++g) {
    const int64_t start = tile + g * kGroup;
    work.next_keys[g] = start < seen.end ? work.args->keys + row_offset(work, start) : work.keys.rows[g];
  }
}

// The processor's own prefetcher stops at the end of a page, which a block of keys often is.
template <int Bytes>
PF_INLINE void prefetch(const uint8_t* p) {
  for (int i = 0; i < Bytes; i += 64) __builtin_prefetch(p + i);
}

// -- loading: 16 bytes of as many keys as a vector has lanes, transposed ---------------------------------

// out[i] has the i-th four bytes of every key.
PF_INLINE void transpose(const uint8_t* p, int64_t stride, vi (&out)[4]) {
#if defined(__AVX512F__)
  __m512 rows[4];  // keys i, i + 4, i + 8, i + 12
  for (int i = 0; i < 4; ++i) {
    const uint8_t* q = p + i * stride;
    const __m512 first = _mm512_castps128_ps512(_mm_loadu_ps((const float*)q));
    const __m512 second = _mm512_insertf32x4(first, _mm_loadu_ps((const float*)(q + 4 * stride)), 1);
    const __m512 third = _mm512_insertf32x4(second, _mm_loadu_ps((const float*)(q + 8 * stride)), 2);
    rows[i] = _mm512_insertf32x4(third, _mm_loadu_ps((const float*)(q + 12 * stride)), 3);
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(rows[0], rows[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(rows[0], rows[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(rows[2], rows[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(rows[2], rows[3]));
  out[0] = (vi)_mm512_unpacklo_pd(a, c);
  out[1] = (vi)_mm512_unpackhi_pd(a, c);
  out[2] = (vi)_mm512_unpacklo_pd(b, d);
  out[3] = (vi)_mm512_unpackhi_pd(b, d);
#elif defined(__AVX2__)
  __m256 rows[4];  // keys i and i + 4
  for (int i = 0; i < 4; ++i) {
    const uint8_t* q = p + i * stride;
    const __m256 first = _mm256_castps128_ps256(_mm_loadu_ps((const float*)q));
    rows[i] = _mm256_insertf128_ps(first, _mm_loadu_ps((const float*)(q + 4 * stride)), 1);
  }
  const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(rows[0], rows[1]));
  const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(rows[0], rows[1]));
  const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(rows[2], rows[3]));
  const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(rows[2], rows[3]));
  out[0] = (vi)_mm256_unpacklo_pd(a, c);
  out[1] = (vi)_mm256_unpackhi_pd(a, c);
  out[2] = (vi)_mm256_unpacklo_pd(b, d);
  out[3] = (vi)_mm256_unpackhi_pd(b, d);
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    int32_t words[4];
    std::memcpy(words, p + lane * stride, sizeof words);
    for (int i = 0; i < 4; ++i) out[i][lane] = words[i];
  }
#endif
}

// Four bytes of every key are one dimension in float32, two in 16 bits, four in int8.
PF_INLINE void widen(vi words, const float*, vf* out) { out[0] = as_float(words); }

PF_INLINE void widen(vi words, const bf16*, vf* out) {
  out[0] = as_float(words << 16);
  out[1] = as_float(words & int32_t(0xffff0000));
}

PF_INLINE void widen(vi words, const f16*, vf* out) {
#if defined(__AVX512F__)
  out[0] = (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)words));
  out[1] = (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)words, 16)));
#elif defined(__AVX2__)
  const __m256i low = _mm256_and_si256((__m256i)words, _mm256_set1_epi32(0xffff));
  const __m256i both = _mm256_packus_epi32(low, _mm256_srli_epi32((__m256i)words, 16));
  const __m256i apart = _mm256_permute4x64_epi64(both, 0xd8);
  out[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(apart));
  out[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1));
#else
  for (int i = 0; i < kLanes; ++i) {
    out[0][i] = f16_to_float(uint16_t(words[i]));
    out[1][i] = f16_to_float(uint16_t(uint32_t(words[i]) >> 16));
  }
#endif
}

PF_INLINE void widen(vi words, const i8*, vf* out) {
  for (int i = 0; i < 4; ++i) out[i] = to_float((words << (24 - 8 * i)) >> 24);
}

template <class T>
constexpr int kStep = 16 / sizeof(T);  // dimensions in 16 bytes

template <class T>
PF_INLINE void load_keys(const uint8_t* p, int64_t stride, vf (&out)[kStep<T>]) {
  vi words[4];
  transpose(p, stride, words);
  for (int i = 0; i < 4; ++i) widen(words[i], (const T*)nullptr, out + i * (kStep<T> / 4));
}

// 16 dimensions of one key. `order` and `reorder` are to be applied to sums of them before and after: they may lie in
// an order that is quicker to load.
template <class T>
PF_INLINE void load_values(const T* p, vf (&out)[kPanelVecs]) {
  for (int i = 0; i < kPanelVecs; ++i) out[i] = load(p + i * kLanes);
}

PF_INLINE void load_values(const i8* p, vf (&out)[kPanelVecs]) {
#if defined(__AVX512F__)
  out[0] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i)
    out[i] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + i * 8))));
#else
  for (int i = 0; i < kPanelVecs; ++i)
    for (int j = 0; j < kLanes; ++j) out[i][j] = float(p[i * kLanes + j].value);
#endif
}

template <class T>
PF_INLINE void load_unordered(const T* p, vf (&out)[kPanelVecs]) { load_values(p, out); }

template <class T>
PF_INLINE void order(const T*, vf (&)[kPanelVecs]) {}

template <class T>
PF_INLINE void reorder(const T*, vf (&)[kPanelVecs]) {}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Even dimensions, then odd ones: a shift and a mask where the true order takes two shuffles more.
PF_INLINE void load_unordered(const bf16* p, vf (&out)[2]) {
  const vi both = (vi)_mm256_loadu_si256((const __m256i*)p);
  out[0] = as_float(both << 16);
  out[1] = as_float(both & int32_t(0xffff0000));
}

PF_INLINE void order(const bf16*, vf (&v)[2]) {
  const __m256 a = (__m256)v[0], b = (__m256)v[1];
  const __m256d even = (__m256d)_mm256_shuffle_ps(a, b, 0x88), odd = (__m256d)_mm256_shuffle_ps(a, b, 0xdd);
  v[0] = (vf)_mm256_permute4x64_pd(even, 0xd8);
  v[1] = (vf)_mm256_permute4x64_pd(odd, 0xd8);
}

PF_INLINE void reorder(const bf16*, vf (&v)[2]) {
  const __m256 low = _mm256_unpacklo_ps((__m256)v[0], (__m256)v[1]);
  const __m256 high = _mm256_unpackhi_ps((__m256)v[0], (__m256)v[1]);
  v[0] = (vf)_mm256_permute2f128_ps(low, high, 0x20);
  v[1] = (vf)_mm256_permute2f128_ps(low, high, 0x31);
}
#endif

// -- products ------------------------------------------------------------------------------------------

// out [R, 16 C] (+)= a [R, begin:end] @ panels [C][begin:end][16]; with factors, the old out times factors[r] is kept.
template <int R, int C>
static void multiply(const float* a, int64_t a_stride, const float* panels, int64_t panel_stride, Range range,
                     float* out, int64_t out_stride, int64_t out_panel, const float* factors) {
  vf acc[R][C][kPanelVecs];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int i = 0; i < kPanelVecs; ++i)
        acc[r][c][i] = factors ? load(out + r * out_stride + c * out_panel + i * kLanes) * factors[r] : vf{};
  for (int64_t k = range.begin; k < range.end; ++k) {
    vf b[C][kPanelVecs];
    for (int c = 0; c < C; ++c)
      for (int i = 0; i < kPanelVecs; ++i) b[c][i] = load(panels + c * panel_stride + k * 16 + i * kLanes);
    for (int r = 0; r < R; ++r) {
      const vf x = set1(a[r * a_stride + k]);
      for (int c = 0; c < C; ++c)
        for (int i = 0; i < kPanelVecs; ++i) acc[r][c][i] = fma(x, b[c][i], acc[r][c][i]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int i = 0; i < kPanelVecs; ++i) store(out + r * out_stride + c * out_panel + i * kLanes, acc[r][c][i]);
}

// Calls Body::template run<rows>.
template <class Body, int R>
PF_INLINE void with_rows(const Body& body, int64_t row, int64_t rows) {
  if constexpr (R > 0) {
    if (rows == R) body.template run<R>(row);
    else with_rows<Body, R - 1>(body, row, rows);
  }
}

// All rows, in blocks as even as can be.
template <class Body>
PF_INLINE void by_rows(const Body& body, int64_t rows) {
  for (int64_t row = 0; row < rows;) {
    const int64_t left = rows - row, blocks = (left + Body::kRows - 1) / Body::kRows;
    const int64_t count = (left + blocks - 1) / blocks;
    with_rows<Body, Body::kRows>(body, row, count);
    row += count;
  }
}

// Scores of one or two groups of keys from their panels.
template <int C>
struct PanelScores {
  static constexpr int kRows = kProductRows;
  const Work& work;
  int64_t tile, group;

  template <int R>
  void run(int64_t row) const {
    const Range seen = seen_of_tile(work, tile, row, R);
    if (seen.begin >= (group + C) * kGroup || seen.end <= group * kGroup) return;
    multiply<R, C>(work.q + row * work.dim, work.dim, work.key_panels + group * kGroup * work.dim, kGroup * work.dim,
                   {0, work.args->head_dim}, work.scores + row * kTile + group * kGroup, kTile, kGroup, nullptr);
  }
};

// C columns of 16 weighted values from their panels.
template <int C>
struct PanelValues {
  static constexpr int kRows = kProductRows;
  const Work& work;
  int64_t tile, column;

  template <int R>
  void run(int64_t row) const {
    const Range seen = seen_of_tile(work, tile, row, R);
    if (seen.begin >= seen.end) return;
    multiply<R, C>(work.scores + row * kTile, kTile, work.value_panels + column * kValuePanel, kValuePanel, seen,
                   work.part.values + row * work.dim + column * 16, work.dim, 16, work.factors + row);
  }
};

template <class T>
static void fill_key_panels(const Work& work) {
  for (int64_t g = 0; g < kGroups; ++g)
    for (int64_t d = 0; d < work.dim; d += kStep<T>)
      for (int i = 0; i < kPanelVecs; ++i) {
        vf keys[kStep<T>];
        const int64_t stride = work.keys.stride[g];
        load_keys<T>(work.keys.rows[g] + i * kLanes * stride + d * sizeof(T), stride, keys);
        prefetch<kLanes * 16>(work.values.rows[g] + i * kLanes * stride + d / kStep<T> * kLanes * 16);
        float* panel = work.key_panels + (g * work.dim + d) * kGroup + i * kLanes;
        for (int j = 0; j < kStep<T>; ++j) store(panel + j * kGroup, keys[j]);
      }
}

template <class T>
static void fill_value_panels(const Work& work) {
  for (int64_t key = 0; key < kTile; ++key) {
    const int64_t group = key / kGroup, offset = key % kGroup * work.values.stride[group];
    const T* row = (const T*)(work.values.rows[group] + offset);
    for (int64_t c = 0; c < work.dim / 16; ++c) {
      prefetch<16 * sizeof(T)>(work.next_keys[group] + offset + c * 16 * sizeof(T));
      vf values[kPanelVecs];
      load_values(row + c * 16, values);
      for (int i = 0; i < kPanelVecs; ++i)
        store(work.value_panels + c * kValuePanel + key * 16 + i * kLanes, values[i]);
    }
  }
}

// Scores of R rows and N vectors of keys, from the cache.
template <class T, int R, int N>
PF_INLINE void score_keys(const Work& work, int64_t row, int64_t first) {
  const uint8_t *keys[N], *values[N];
  int64_t strides[N];
  for (int n = 0; n < N; ++n) {
    const int64_t key = (first + n) * kLanes;
    strides[n] = work.keys.stride[key / kGroup];
    keys[n] = work.keys.rows[key / kGroup] + key % kGroup * strides[n];
    values[n] = work.values.rows[key / kGroup] + key % kGroup * strides[n];
  }
  const float* q = work.q + row * work.dim;
  vf acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n] = vf{};
  for (int64_t d = 0; d < work.dim; d += kStep<T>) {
    for (int n = 0; n < N; ++n) {
      vf k[kStep<T>];
      load_keys<T>(keys[n] + d * sizeof(T), strides[n], k);
      prefetch<kLanes * 16>(values[n] + d / kStep<T> * kLanes * 16);
      for (int i = 0; i < kStep<T>; ++i)
        for (int r = 0; r < R; ++r) acc[r][n] = fma(set1(q[r * work.dim + d + i]), k[i], acc[r][n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(work.scores + (row + r) * kTile + (first + n) * kLanes, acc[r][n]);
}

template <class T>
struct DirectScores {
  static constexpr int kRows = kDirectRows;
  const Work& work;
  int64_t tile;

  template <int R>
  void run(int64_t row) const {
    constexpr int N = direct_vecs(R);
    const Range seen = seen_of_tile(work, tile, row, R);
    for (int64_t i = seen.begin / (N * kLanes) * N; i * kLanes < seen.end; i += N) score_keys<T, R, N>(work, row, i);
  }
};

// Weighted values of R rows and C columns of 16, from the cache.
template <class T, int R, int C>
PF_INLINE void weigh_values(const Work& work, int64_t row, Range seen, int64_t column) {
  float* out = work.part.values + row * work.dim + column * 16;
  const float* weights = work.scores + row * kTile;
  vf acc[R][C][kPanelVecs];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      for (int i = 0; i < kPanelVecs; ++i)
        acc[r][c][i] = load(out + r * work.dim + c * 16 + i * kLanes) * work.factors[row + r];
      order((const T*)nullptr, acc[r][c]);
    }
  for (int64_t g = seen.begin / kGroup; g * kGroup < seen.end; ++g) {
    const int64_t begin = at_least(seen.begin, g * kGroup), end = at_most(seen.end, (g + 1) * kGroup);
    const int64_t stride = work.values.stride[g];
    const int64_t offset = (begin - g * kGroup) * stride + column * 16 * sizeof(T);
    const uint8_t *p = work.values.rows[g] + offset, *next = work.next_keys[g] + offset;
    for (int64_t key = begin; key < end; ++key, p += stride, next += stride) {
      prefetch<C * 16 * sizeof(T)>(next);
      for (int c = 0; c < C; ++c) {
        vf v[kPanelVecs];
        load_unordered((const T*)p + c * 16, v);
        for (int r = 0; r < R; ++r) {
          const vf weight = set1(weights[r * kTile + key]);
          for (int i = 0; i < kPanelVecs; ++i) acc[r][c][i] = fma(weight, v[i], acc[r][c][i]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      reorder((const T*)nullptr, acc[r][c]);
      for (int i = 0; i < kPanelVecs; ++i) store(out + r * work.dim + c * 16 + i * kLanes, acc[r][c][i]);
    }
}

template <class T>
struct DirectValues {
  static constexpr int kRows = kDirectRows;
  const Work& work;
  int64_t tile;

  template <int R>
  void run(int64_t row) const {
    constexpr int C = direct_columns(R);
    const Range seen = seen_of_tile(work, tile, row, R);
    if (seen.begin >= seen.end) return;
    int64_t column = 0;
    for (; column + C <= work.dim / 16; column += C) weigh_values<T, R, C>(work, row, seen, column);
    for (; column < work.dim / 16; ++column) weigh_values<T, R, 1>(work, row, seen, column);
  }
};

// -- softmax -------------------------------------------------------------------------------------------

PF_INLINE vf lane_numbers() {
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = float(i);
  return v;
}

PF_INLINE vf no_less_than(vf maximum) {  // what to subtract: the maximum, or 0 where there is no key yet
  return select(maximum == kHidden, vf{}, maximum);
}

// A row's scores as the model wants them, hidden ones -infinity; returns their maximum.
PF_INLINE float finish_scores(const Work& work, int64_t tile, int64_t row, Range seen) {
  const AttentionArgs& args = *work.args;
  const int64_t token = row / work.heads, head = work.kv_head * work.heads + row % work.heads;
  float* scores = work.scores + row * kTile;
  const float cap = args.soft_cap, slope = args.alibi_slopes ? args.alibi_slopes[head] : 0.0f;
  const float distance = float(tile - (work.first_position + token));  // of key 0 from the query
  const bool all = seen.begin == 0 && seen.end == kTile;
  vf maximum = set1(kHidden);
  for (int64_t i = 0; i < kTileVecs; ++i) {
    vf s = load(scores + i * kLanes);
    const vf key = lane_numbers() + float(i * kLanes);
    if (args.kv_dtype == DType::i8) s *= load(work.keys.scales + i * kLanes);
    if (cap != 0) s = cap * tanh(s / cap);
    if (slope != 0) s = fma(set1(slope), key + distance, s);
    if (!all) s = select((key >= float(seen.begin)) & (key < float(seen.end)), s, set1(kHidden));
    store(scores + i * kLanes, s);
    maximum = max(s, maximum);
  }
  float lanes[kLanes], largest = kHidden;
  store(lanes, maximum);
  for (int i = 0; i < kLanes; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  return largest;
}

// Scores become weights exp(score - maximum); returns their sum.
PF_INLINE float weigh(const Work& work, int64_t row, float maximum) {
  float* scores = work.scores + row * kTile;
  Wide sums = zero_wide();
  for (int64_t i = 0; i < kTileVecs; ++i) {
    const vf weight = exp(load(scores + i * kLanes) - maximum);
    sums.v[i % kPanelVecs] += weight;
    store(scores + i * kLanes,
          work.args->kv_dtype == DType::i8 ? weight * load(work.values.scales + i * kLanes) : weight);
  }
  return sum_wide(sums);
}

static void softmax(const Work& work, int64_t tile) {
  float* maximum = work.part.maximum;
  for (int64_t row = 0; row < work.rows; ++row) {
    const Range seen = seen_of_tile(work, tile, row, 1);
    float* scores = work.scores + row * kTile;
    work.factors[row] = maximum[row];  // the old one, for now
    if (seen.begin >= seen.end) {
      for (int64_t i = 0; i < kTile; ++i) scores[i] = kHidden;
      continue;
    }
    const float largest = finish_scores(work, tile, row, seen);
    maximum[row] = largest > maximum[row] ? largest : maximum[row];
  }
  for (int64_t row = 0; row < work.rows; row += kLanes)
    store(work.factors + row, exp(load(work.factors + row) - no_less_than(load(maximum + row))));
  for (int64_t row = 0; row < work.rows; ++row)
    work.tile_sums[row] = weigh(work, row, maximum[row] == kHidden ? 0.0f : maximum[row]);
  for (int64_t row = 0; row < work.rows; row += kLanes)
    store(work.part.sum + row,
          fma(load(work.part.sum + row), load(work.factors + row), load(work.tile_sums + row)));
}

// -- sums ----------------------------------------------------------------------------------------------

static void reset(const Sums& sums, int64_t rows, int64_t dim) {
  for (int64_t i = 0; i < round_up(rows, 16); ++i) sums.maximum[i] = kHidden, sums.sum[i] = 0;
  std::memset(sums.values, 0, rows * dim * 4);
}

// into = into and part, for `rows` rows.
static void merge(const Sums& into, const Sums& part, int64_t rows, int64_t dim) {
  for (int64_t row = 0; row < rows; row += kLanes) {
    const vf old = load(into.maximum + row), other = load(part.maximum + row), maximum = max(old, other);
    const vf keep = exp(old - no_less_than(maximum)), take = exp(other - no_less_than(maximum));
    store(into.maximum + row, maximum);
    store(into.sum + row, fma(load(into.sum + row), keep, load(part.sum + row) * take));
    float keeps[kLanes], takes[kLanes];
    store(keeps, keep);
    store(takes, take);
    for (int64_t r = 0; r < kLanes && row + r < rows; ++r) {
      float* values = into.values + (row + r) * dim;
      const float* others = part.values + (row + r) * dim;
      for (int64_t i = 0; i < dim; i += kLanes)
        store(values + i, fma(load(values + i), set1(keeps[r]), load(others + i) * takes[r]));
    }
  }
}

// The row's output from its sums; a sink takes part in them last.
static void finish_row(const AttentionArgs& args, int64_t token, int64_t head, const Sums& sums, int64_t row,
                       int64_t dim) {
  vf maximum = set1(sums.maximum[row]), sum = set1(sums.sum[row]), factor = set1(1.0f);
  if (args.sinks) {
    const vf sink = set1(args.sinks[head]), larger = max(maximum, sink);
    factor = exp(maximum - no_less_than(larger));
    sum = fma(sum, factor, exp(sink - no_less_than(larger)));
  }
  factor = select(sum == vf{}, vf{}, factor / sum);
  float out[kMaxHeadDim];
  for (int64_t i = 0; i < dim; i += kLanes) store(out + i, load(sums.values + row * dim + i) * factor);
  store_head(args.out, args.dtype, (token * args.heads + head) * args.head_dim, args.head_dim, out);
}

// -- items ---------------------------------------------------------------------------------------------

static void load_queries(const Work& work) {
  const AttentionArgs& args = *work.args;
  for (int64_t row = 0; row < work.rows; ++row) {
    const int64_t token = work.first_token + row / work.heads;
    const int64_t head = work.kv_head * work.heads + row % work.heads;
    float* q = work.q + row * work.dim;
    load_head(args.q, args.dtype, (token * args.heads + head) * args.head_dim, args.head_dim, q);
    for (int64_t i = args.head_dim; i < work.dim; ++i) q[i] = 0;
    for (int64_t i = 0; i < work.dim; i += kLanes) store(q + i, load(q + i) * args.scale);
  }
}

template <class T>
static void attend_tile(Work& work, int64_t tile, Range seen) {
  locate(work, work.args->keys, seen, tile, work.key_copies, work.keys);
  locate(work, work.args->values, seen, tile, work.value_copies, work.values);
  look_ahead(work, seen, tile + kTile);
  read_scales(work, work.args->keys, seen, tile, work.keys.scales);
  if (work.rows <= kDirectLimit) {
    by_rows(DirectScores<T>{work, tile}, work.rows);
    read_scales(work, work.args->values, seen, tile, work.values.scales);  // by now they have been fetched
    softmax(work, tile);
    by_rows(DirectValues<T>{work, tile}, work.rows);
    return;
  }
  fill_key_panels<T>(work);
  for (int64_t group = 0; group < kGroups; group += kProductPanels)
    by_rows(PanelScores<kProductPanels>{work, tile, group}, work.rows);
  read_scales(work, work.args->values, seen, tile, work.values.scales);
  softmax(work, tile);
  fill_value_panels<T>(work);
  int64_t column = 0;
  for (; column + kProductPanels <= work.dim / 16; column += kProductPanels)
    by_rows(PanelValues<kProductPanels>{work, tile, column}, work.rows);
  for (; column < work.dim / 16; ++column) by_rows(PanelValues<1>{work, tile, column}, work.rows);
}

static void attend_part(Work& work, int64_t part, Range seen) {
  reset(work.part, work.rows, work.dim);
  const int64_t begin = at_least(seen.begin / kTile * kTile, part * kKeyPart);
  const int64_t end = at_most(seen.end, (part + 1) * kKeyPart);
  for (int64_t tile = begin; tile < end; tile += kTile) {
    switch (work.args->kv_dtype) {
      case DType::f32: attend_tile<float>(work, tile, seen); break;
      case DType::bf16: attend_tile<bf16>(work, tile, seen); break;
      case DType::f16: attend_tile<f16>(work, tile, seen); break;
      case DType::i8: attend_tile<i8>(work, tile, seen); break;
    }
  }
}

// A partial is `partial_floats` of each query head: maximum, sum, and from kPartialValues on the values.
static void store_partial(const Work& work, float* partial) {
  for (int64_t row = 0; row < work.rows; ++row, partial += partial_floats(work.args->head_dim)) {
    partial[0] = work.part.maximum[row];
    partial[1] = work.part.sum[row];
    std::memcpy(partial + kPartialValues, work.part.values + row * work.dim, work.dim * 4);
  }
}

// `first` and `count` are tokens of the item.
static void attend(Work& work, const AttentionWork& item, int64_t first, int64_t count) {
  const AttentionArgs& args = *work.args;
  const int64_t row_end = args.query_starts[item.row + 1];
  work.row = item.row;
  work.kv_head = item.kv_head;
  work.first_token = item.first_query + first;
  work.tokens = count;
  work.rows = count * work.heads;
  work.first_position = args.seq_lens[item.row] - (row_end - work.first_token);
  const Range seen = {seen_by_token(work, 0).begin, seen_by_token(work, count - 1).end};
  load_queries(work);
  reset(work.total, work.rows, work.dim);
  for (int64_t part = item.first_part; part < item.first_part + item.num_parts; ++part) {
    attend_part(work, part, seen);
    if (item.partial < 0) {
      merge(work.total, work.part, work.rows, work.dim);
    } else {
      const int64_t slot = item.partial + (part - item.first_part) * item.num_queries + first;
      store_partial(work, args.partials + slot * work.heads * partial_floats(args.head_dim));
    }
  }
  if (item.partial >= 0) return;
  for (int64_t row = 0; row < work.rows; ++row)
    finish_row(args, work.first_token + row / work.heads, work.kv_head * work.heads + row % work.heads, work.total, row,
               work.dim);
}

static void attention_items(const AttentionArgs& args, int64_t begin, int64_t end, uint8_t* scratch) {
  Work work;
  lay_out(args, scratch, work);
  const int64_t tokens = at_least(kRowsAtOnce / work.heads, 1);
  for (int64_t i = begin; i < end; ++i)
    for (int64_t first = 0; first < args.work[i].num_queries; first += tokens)
      attend(work, args.work[i], first, at_most(tokens, args.work[i].num_queries - first));
}

// An item has all parts of its row: work[i].partial is the first one's place.
static void merge_items(const MergeArgs& merge_args, int64_t begin, int64_t end) {
  const AttentionArgs& args = *merge_args.attention;
  const int64_t heads = args.heads / args.kv_heads, dim = round_up(args.head_dim, 16);
  const int64_t floats = partial_floats(args.head_dim);
  float maximum[16], sum[16], values[kMaxHeadDim], part_maximum[16] = {}, part_sum[16] = {};
  const Sums total = {maximum, sum, values};
  for (int64_t i = begin; i < end; ++i) {
    const AttentionWork& item = merge_args.work[i];
    for (int64_t row = 0; row < item.num_queries * heads; ++row) {
      reset(total, 1, dim);
      for (int64_t part = 0; part < item.num_parts; ++part) {
        float* partial = args.partials + ((item.partial + part * item.num_queries) * heads + row) * floats;
        part_maximum[0] = partial[0];
        part_sum[0] = partial[1];
        merge(total, {part_maximum, part_sum, partial + kPartialValues}, 1, dim);
      }
      finish_row(args, item.first_query + row / heads, item.kv_head * heads + row % heads, total, 0, dim);
    }
  }
}

}  // namespace pagefleet::PAGEFLEET_ISA
