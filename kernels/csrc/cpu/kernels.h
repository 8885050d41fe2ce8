// The table of CPU kernels: what each takes, and one pointer to each per instruction set.
//
// A kernel computes a range of its independent items on the calling thread and touches nothing else: who runs which
// range is decided outside (ops.cpp, pool.h). It trusts its arguments, which are checked at the ops' door.
// No torch, and no C++ standard library that the linker could merge across instruction sets.
#pragma once

#include <cstdint>

namespace pagefleet {

enum class DType : int32_t { f32, bf16, f16, i8 };

static inline int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::i8 ? 1 : 2; }

// How a packed weight keeps its values. The order is that of `FORMATS` in pagefleet_kernels/cpu.py.
enum class Format : int32_t { f32, bf16, f16, int8, q8_0, q4_0, q4_1, q4_k, q6_k };

enum class Activation : int32_t { none, silu, gelu, gelu_tanh };

constexpr int64_t kMaxHeadDim = 256;  // a head passes through memory on the stack
constexpr int64_t kPanel = 16;  // outputs of a weight that lie together, in every format and for every instruction set

// Activations [rows, k] into the form that a weight's format multiplies with; an item is a row.
struct PrepareArgs {
  const void* x;
  DType dtype;
  int64_t stride;  // elements between rows of x
  int64_t k;
  Format format;
  uint8_t* out;
  int64_t out_stride;  // bytes between prepared rows, Kernels::prepared_bytes
};

// out [m, n] = a [m, k] @ weight [n, k]^T + bias; with a gate, out [m, n / 2] = gate(left half) * right half.
struct LinearArgs {
  const uint8_t* a;   // prepared rows
  int64_t a_stride;   // bytes
  const uint8_t* weight;  // packed: ceil(n / 16) panels
  int64_t panel_bytes;
  Format format;
  int64_t n, k;
  const float* bias;  // [n] or null
  Activation gate;
  void* out;
  DType out_dtype;
  int64_t out_stride;  // elements between rows
};

// out [rows, k]: rows of a packed weight, an embedding; an item is a row.
struct GatherArgs {
  const int32_t* ids;
  const uint8_t* weight;
  int64_t panel_bytes;
  Format format;
  int64_t k;
  void* out;
  DType dtype;
};

// residual += x (unless null); out = norm(residual) * weight (+ bias, when it is a LayerNorm); an item is a row.
struct NormArgs {
  const void* x;      // [rows, n] or null
  const void* residual;  // [rows, n]
  void* sum;          // [rows, n] where residual + x goes; may be residual; null with x
  void* out;          // [rows, n]
  DType dtype;        // of all of them
  const float* weight;  // [n]
  const float* bias;  // [n] or null
  bool layer_norm;    // subtract the mean
  int64_t n;
  int64_t stride;     // elements between rows of x and residual
  float eps;
};

// Turn queries and keys, write keys and values to their slots; an item is a token.
struct RopeArgs {
  const void* qkv;  // [tokens, (heads + 2 * kv_heads) * head_dim]
  DType dtype;
  int64_t stride;   // elements between tokens of qkv
  int64_t heads, kv_heads, head_dim, rotary_dim;
  bool interleaved;      // pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2)
  const float* q_norm;   // [head_dim] or null: RMSNorm of each query head before it is turned
  const float* k_norm;
  float eps;
  const float* rotary;   // [tokens, 2 (cos, sin), rotary_dim], or null: nothing turns. "sin" has rotate-half's signs
  const int32_t* slots;      // [tokens], below 0: not written
  void* q;                   // [tokens, heads * head_dim], dtype
  uint8_t* keys;             // [blocks, kv_heads, block_size, row_bytes]
  uint8_t* values;
  DType kv_dtype;            // i8: head_dim int8 values, then their float32 scale
  int64_t block_size;
  int64_t row_bytes;         // of one key of one head
};

// Causal attention over paged keys. Item i is one of `work`; see attention.h.
struct AttentionWork {
  int32_t row, kv_head;
  int32_t first_query, num_queries;  // tokens of the batch
  int32_t first_part, num_parts;     // parts of kKeyPart keys that this item sums up
  int32_t partial;                   // of a split row: where its parts go in `partials`, num_queries each; else -1
};

constexpr int64_t kKeyPart = 512;  // keys whose sum is made on its own: the order of additions never depends on the batch

struct AttentionArgs {
  const void* q;  // [tokens, heads * head_dim]
  DType dtype;    // of q and out
  void* out;      // [tokens, heads * head_dim]
  int64_t heads, kv_heads, head_dim;
  const uint8_t* keys;  // as in RopeArgs
  const uint8_t* values;
  DType kv_dtype;
  int64_t block_size, row_bytes;
  const int32_t* block_tables;  // [rows, table_stride]
  int64_t table_stride;
  const int32_t* query_starts;  // [rows + 1]
  const int32_t* seq_lens;      // [rows]
  int64_t window;               // 0: none
  float scale, soft_cap;        // soft_cap 0: none
  const float* alibi_slopes;    // [heads] or null
  const float* sinks;           // [heads] or null: a logit of each head that takes weight but has no value
  const AttentionWork* work;
  float* partials;  // [num_partials, heads / kv_heads, partial_floats]: maximum, sum; from kPartialValues on the values
};

constexpr int64_t kPartialValues = 16;
static inline int64_t partial_floats(int64_t head_dim) { return kPartialValues + (head_dim + 15) / 16 * 16; }

// Add the partials of split rows up in order. An item has all parts of some tokens: `partial` is where they begin,
// part after part, each with its num_queries tokens.
struct MergeArgs {
  const AttentionArgs* attention;
  const AttentionWork* work;
};

// Gated activation [rows, 2 n] -> [rows, n]; an item is a row.
struct GateArgs {
  const void* x;
  void* out;
  DType dtype;
  int64_t n;
  Activation activation;
};

// A token drawn from each row of logits; an item is a row. See sample.h.
struct SampleArgs {
  const float* logits;  // [rows, vocab]
  int64_t stride;       // elements between rows
  int64_t vocab;
  const float* temperature;  // [rows], 0: the most likely token
  const int32_t* top_k;      // 0: all
  const float* top_p;
  const float* min_p;
  const double* uniforms;  // [rows] in [0, 1): the quantile to take
  int32_t* tokens;         // [rows], -1: no logit is above -infinity, or one is NaN
};

// Logits of tokens whose bit is 0 become -infinity; an item is a row.
struct MaskArgs {
  float* logits;  // [rows, vocab]
  int64_t stride, vocab;
  const int32_t* masks;  // [rows, ceil(vocab / 32)], bit i % 32 of word i / 32 is token i's
};

struct Kernels {
  const char* isa;
  int64_t (*prepared_bytes)(Format format, int64_t k);  // of one row, a multiple of 64
  void (*prepare)(const PrepareArgs&, int64_t begin, int64_t end);
  void (*linear)(const LinearArgs&, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end);
  void (*gather)(const GatherArgs&, int64_t begin, int64_t end);
  void (*norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*rope)(const RopeArgs&, int64_t begin, int64_t end);
  int64_t (*attention_scratch)(const AttentionArgs&);  // bytes a thread needs, for up to kMaxQueries query tokens
  void (*attention)(const AttentionArgs&, int64_t begin, int64_t end, uint8_t* scratch);
  void (*merge)(const MergeArgs&, int64_t begin, int64_t end);
  void (*gate)(const GateArgs&, int64_t begin, int64_t end);
  int64_t (*sample_scratch)(int64_t vocab);  // bytes a thread needs
  void (*sample)(const SampleArgs&, int64_t begin, int64_t end, uint8_t* scratch);
  void (*mask)(const MaskArgs&, int64_t begin, int64_t end);
};

constexpr int64_t kMaxQueries = 64;  // query tokens of one item of attention

// Bytes of one panel (16 outputs, k inputs), and a weight's rows packed into panels, for every format the same on
// every machine: pack.cpp. `rows` are [n, row_bytes] as in a file; missing outputs of the last panel are zeros.
int64_t row_bytes(Format format, int64_t k);
int64_t panel_bytes(Format format, int64_t k);
void pack(Format format, const uint8_t* rows, int64_t n, int64_t k, uint8_t* packed, int64_t panel_begin, int64_t panel_end);

}  // namespace pagefleet
