// The kernels as torch ops: everything is checked here, at the door, then cut into chunks for the pool.
//
// Stable ABI only, so that one build loads in every torch of the range. Outputs are given by the caller.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "attention_work.h"
#include "dispatch.h"
#include "pool.h"
#include "steps.h"

namespace pagefleet {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

DType dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    case ScalarType::Char: return DType::i8;
    default: STD_TORCH_CHECK(false, name, " must be float32, bfloat16, float16 or int8");
  }
  return DType::f32;
}

DType float_type(const Tensor& tensor, const char* name) {
  const DType dtype = dtype_of(tensor, name);
  STD_TORCH_CHECK(dtype != DType::i8, name, " must be float32, bfloat16 or float16");
  return dtype;
}

void check_rows(const Tensor& tensor, const char* name, int64_t columns) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(1) == columns, name, " must be [rows, ", columns, "]");
  STD_TORCH_CHECK(tensor.numel() == 0 || columns <= 1 || tensor.stride(1) == 1, name, "'s last dimension must be contiguous");
}

void check_dense(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

const float* floats(const std::optional<Tensor>& tensor, const char* name, int64_t size) {
  if (!tensor) return nullptr;
  STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Float && tensor->numel() == size && tensor->is_contiguous(), name,
                  " must be float32 [", size, "]");
  return static_cast<const float*>(tensor->const_data_ptr());
}

const int32_t* integers(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Int && tensor.is_contiguous(), name, " must be contiguous int32");
  return static_cast<const int32_t*>(tensor.const_data_ptr());
}

constexpr int64_t kMaxSize = int64_t(1) << 28;  // of a weight's sides, and of what they are made of: no product overflows

// A packed weight [n, k], checked against its bytes.
Weight packed(const Tensor& weight, int64_t code, int64_t n, int64_t k) {
  STD_TORCH_CHECK(code >= 0 && code <= int64_t(Format::q6_k), "unknown weight format ", code);
  const Format format = Format(code);
  STD_TORCH_CHECK(n <= kMaxSize && k <= kMaxSize, "a weight of ", n, " x ", k, " is beyond ", kMaxSize);
  STD_TORCH_CHECK(n > 0 && k > 0 && row_bytes(format, k) > 0, "a weight of ", n, " x ", k, " in format ", code,
                  " has no whole blocks");
  const int64_t bytes = panel_bytes(format, k);
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Byte && weight.is_contiguous() &&
                      weight.numel() >= (n + kPanel - 1) / kPanel * bytes,
                  "the packed weight is smaller than ", n, " x ", k);
  return {static_cast<const uint8_t*>(weight.const_data_ptr()), format, n, k, bytes};
}

void pack_weight(const Tensor rows, int64_t format, int64_t n, int64_t k, Tensor out) {
  const Weight weight = packed(out, format, n, k);
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Byte && rows.is_contiguous() &&
                      rows.numel() == n * row_bytes(weight.format, k),
                  "rows must be uint8 [", n, ", ", row_bytes(weight.format, k), "]");
  const auto* source = static_cast<const uint8_t*>(rows.const_data_ptr());
  auto* target = static_cast<uint8_t*>(out.mutable_data_ptr());
  Pool::instance().run((n + kPanel - 1) / kPanel, 4, [&](int64_t begin, int64_t end, int) {
    pack(weight.format, source, n, k, target, begin, end);
  });
}

Rows matrix(const Tensor& tensor, const char* name, int64_t columns) {
  check_rows(tensor, name, columns);
  return {const_cast<void*>(tensor.const_data_ptr()), float_type(tensor, name), tensor.size(0), tensor.stride(0)};
}

Activation activation_of(int64_t code) {
  STD_TORCH_CHECK(code >= 0 && code <= int64_t(Activation::gelu_tanh), "unknown activation ", code);
  return Activation(code);
}

void linear(Tensor out, const Tensor x, const Tensor weight, const std::optional<Tensor> bias, int64_t format, int64_t n,
            int64_t k, int64_t gate) {
  const Weight own = packed(weight, format, n, k);
  const Activation activation = activation_of(gate);
  STD_TORCH_CHECK(!gate || n % (2 * kPanel) == 0, "a gated product needs a multiple of ", 2 * kPanel, " outputs, not ", n);
  const Rows in = matrix(x, "x", k), result = matrix(out, "out", gate ? n / 2 : n);
  STD_TORCH_CHECK(in.rows == result.rows, "out has ", result.rows, " rows, x has ", in.rows);
  Arena arena;
  run_linear(choose_kernels(), in, own, floats(bias, "bias", n), activation, result, arena);
}

void gather(Tensor out, const Tensor ids, const Tensor weight, int64_t format, int64_t n, int64_t k) {
  const Weight own = packed(weight, format, n, k);
  check_dense(out, "out");
  check_rows(out, "out", k);
  const int32_t* rows = integers(ids, "ids");
  STD_TORCH_CHECK(ids.numel() == out.size(0), "out has ", out.size(0), " rows for ", ids.numel(), " ids");
  for (int64_t i = 0; i < ids.numel(); ++i)
    STD_TORCH_CHECK(rows[i] >= 0 && rows[i] < n, "id ", rows[i], " is not among ", n, " rows");
  const GatherArgs args{rows, own.data, own.panel_bytes, own.format, k, out.mutable_data_ptr(), float_type(out, "out")};
  run_gather(choose_kernels(), args, ids.numel());
}

// residual += x where there is one, in place; out = norm(residual) * weight + bias.
void norm(Tensor out, const std::optional<Tensor> x, Tensor residual, const Tensor weight,
          const std::optional<Tensor> bias, double eps, bool layer_norm) {
  const int64_t n = residual.size(residual.dim() - 1), rows = residual.numel() / n;
  for (const Tensor& tensor : {out, residual, x.value_or(residual)}) {
    check_dense(tensor, "x, residual and out");
    STD_TORCH_CHECK(tensor.numel() == residual.numel() && tensor.scalar_type() == residual.scalar_type(),
                    "x, residual and out must have one shape and dtype");
  }
  NormArgs args{};
  args.x = x ? x->const_data_ptr() : nullptr;
  args.residual = residual.const_data_ptr();
  args.sum = x ? residual.mutable_data_ptr() : nullptr;
  args.out = out.mutable_data_ptr();
  args.dtype = float_type(residual, "residual");
  args.weight = floats(weight, "weight", n);
  args.bias = floats(bias, "bias", n);
  args.layer_norm = layer_norm;
  args.n = args.stride = n;
  args.eps = float(eps);
  run_norm(choose_kernels(), args, rows);
}

// A cache [2, blocks, kv_heads, block_size, row] as the kernels see it, or those of several layers [layers, 2, ...].
struct Cache {
  uint8_t *keys, *values;  // of the first layer
  DType dtype;
  int64_t layers, layer_bytes, blocks, kv_heads, block_size, row_bytes;

  Cache(const Tensor& cache, int64_t head_dim) {
    STD_TORCH_CHECK(head_dim > 0 && head_dim % 2 == 0 && head_dim <= kMaxHeadDim, "head_dim is ", head_dim,
                    "; kernels take even ones up to ", kMaxHeadDim);
    const int64_t at = cache.dim() - 5;
    STD_TORCH_CHECK((at == 0 || at == 1) && cache.size(at) == 2 && cache.is_contiguous(),
                    "the cache must be contiguous [2, blocks, kv_heads, block_size, head_dim]");
    dtype = dtype_of(cache, "the cache");
    const int64_t row = cache.size(at + 4);
    STD_TORCH_CHECK(row == (dtype == DType::i8 ? head_dim + 4 : head_dim), "the cache has rows of ", row,
                    " elements for heads of ", head_dim, " (int8: and four bytes of scale)");
    STD_TORCH_CHECK(cache.size(at + 2) > 0 && cache.size(at + 3) > 0, "the cache has no heads, or blocks of no slots");
    layers = at ? cache.size(0) : 1;
    blocks = cache.size(at + 1), kv_heads = cache.size(at + 2), block_size = cache.size(at + 3);
    row_bytes = row * size_of(dtype);
    const int64_t bytes = blocks * kv_heads * block_size * row_bytes;
    layer_bytes = 2 * bytes;
    keys = static_cast<uint8_t*>(cache.mutable_data_ptr());
    values = keys + bytes;
  }
};

// What `rope` and whole layers share; `q`, `qkv` and norms are the caller's to set.
RopeArgs rope_args(const Cache& cache, int64_t tokens, int64_t heads, int64_t head_dim,
                   const std::optional<Tensor>& rotary, const Tensor& slots, double eps, bool interleaved) {
  RopeArgs args{};
  args.heads = heads, args.kv_heads = cache.kv_heads, args.head_dim = head_dim;
  args.stride = (heads + 2 * cache.kv_heads) * head_dim;
  args.interleaved = interleaved;
  args.eps = float(eps);
  if (rotary) {
    STD_TORCH_CHECK(rotary->dim() == 3 && rotary->size(0) == tokens && rotary->size(1) == 2,
                    "rotary must be [tokens, 2, rotary_dim]");
    args.rotary_dim = rotary->size(2);
    STD_TORCH_CHECK(args.rotary_dim <= head_dim && args.rotary_dim % 2 == 0, "rotary_dim is ", args.rotary_dim);
    args.rotary = floats(rotary, "rotary", rotary->numel());
  }
  args.slots = integers(slots, "slots");
  STD_TORCH_CHECK(slots.numel() == tokens, slots.numel(), " slots for ", tokens, " tokens");
  const int64_t num_slots = cache.blocks * cache.block_size;
  for (int64_t i = 0; i < tokens; ++i)
    STD_TORCH_CHECK(args.slots[i] < num_slots, "slot ", args.slots[i], " is beyond the cache's ", num_slots);
  args.keys = cache.keys, args.values = cache.values;
  args.kv_dtype = cache.dtype;
  args.block_size = cache.block_size, args.row_bytes = cache.row_bytes;
  return args;
}

void rope(Tensor q, const Tensor qkv, const std::optional<Tensor> q_norm, const std::optional<Tensor> k_norm,
          const std::optional<Tensor> rotary, const Tensor slots, Tensor cache, double eps, int64_t head_dim,
          bool interleaved) {
  const Cache paged(cache, head_dim);
  STD_TORCH_CHECK(qkv.dim() == 3 && qkv.size(2) == head_dim, "qkv must be [tokens, heads, ", head_dim, "]");
  const int64_t tokens = qkv.size(0), heads = qkv.size(1) - 2 * paged.kv_heads;
  STD_TORCH_CHECK(heads > 0, "qkv has ", qkv.size(1), " heads, of which ", 2 * paged.kv_heads, " are keys and values");
  check_dense(qkv, "qkv");
  check_dense(q, "q");
  STD_TORCH_CHECK(q.numel() == tokens * heads * head_dim && q.scalar_type() == qkv.scalar_type(),
                  "q must be [", tokens, ", ", heads, ", ", head_dim, "] of qkv's dtype");
  RopeArgs args = rope_args(paged, tokens, heads, head_dim, rotary, slots, eps, interleaved);
  args.q_norm = floats(q_norm, "q_norm", head_dim);
  args.k_norm = floats(k_norm, "k_norm", head_dim);
  args.qkv = qkv.const_data_ptr();
  args.dtype = float_type(qkv, "qkv");
  args.q = q.mutable_data_ptr();
  run_rope(choose_kernels(), args, tokens);
}

// Every row's tokens lie in the batch, and every block it reads in the cache: what the kernel trusts.
void check_batch(const AttentionArgs& args, const Cache& cache, int64_t rows, int64_t tokens, int64_t table_width) {
  STD_TORCH_CHECK(args.query_starts[0] == 0 && args.query_starts[rows] <= tokens, "query_starts must run from 0 to at most ",
                  tokens, " tokens");
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t queries = int64_t(args.query_starts[row + 1]) - args.query_starts[row], length = args.seq_lens[row];
    STD_TORCH_CHECK(queries >= 0, "query_starts falls at row ", row);
    STD_TORCH_CHECK(length >= queries, "row ", row, " has ", queries, " query tokens but a length of ", length);
    const int64_t used = (length + args.block_size - 1) / args.block_size;
    STD_TORCH_CHECK(used <= table_width, "row ", row, " of length ", length, " needs ", used, " blocks; its table has ",
                    table_width);
    const int32_t* table = args.block_tables + row * args.table_stride;
    int32_t low = 0, high = 0;
    for (int64_t i = 0; i < used; ++i) low = std::min(low, table[i]), high = std::max(high, table[i]);
    STD_TORCH_CHECK(low >= 0 && high < cache.blocks, "row ", row, "'s block table names block ", low < 0 ? low : high,
                    " of a cache of ", cache.blocks);
  }
}

// What `attention` and whole layers share; `q` and `out` are the caller's to set.
AttentionArgs attention_args(const Cache& cache, int64_t tokens, int64_t heads, int64_t head_dim,
                             const Tensor& block_tables, const Tensor& query_starts, const Tensor& seq_lens,
                             int64_t window, double scale, double soft_cap, const std::optional<Tensor>& alibi_slopes,
                             const std::optional<Tensor>& sinks) {
  const int64_t rows = seq_lens.numel();
  STD_TORCH_CHECK(heads > 0 && heads % cache.kv_heads == 0, heads, " query heads do not share ", cache.kv_heads, " key heads");
  STD_TORCH_CHECK(block_tables.dim() == 2 && block_tables.size(0) == rows, "block_tables must be [", rows, ", blocks]");
  STD_TORCH_CHECK(query_starts.numel() == rows + 1, "query_starts must be [", rows + 1, "]");
  STD_TORCH_CHECK(window >= 0, "window is ", window);
  AttentionArgs args{};
  args.heads = heads, args.kv_heads = cache.kv_heads, args.head_dim = head_dim;
  args.keys = cache.keys, args.values = cache.values;
  args.kv_dtype = cache.dtype;
  args.block_size = cache.block_size, args.row_bytes = cache.row_bytes;
  args.block_tables = integers(block_tables, "block_tables");
  args.table_stride = block_tables.size(1);
  args.query_starts = integers(query_starts, "query_starts");
  args.seq_lens = integers(seq_lens, "seq_lens");
  args.window = window;
  args.scale = float(scale), args.soft_cap = float(soft_cap);
  args.alibi_slopes = floats(alibi_slopes, "alibi_slopes", heads);
  args.sinks = floats(sinks, "sinks", heads);
  check_batch(args, cache, rows, tokens, block_tables.size(1));
  return args;
}

// Tokens in no row, the padding, get zeros.
void attend(const Kernels& kernels, const AttentionArgs& args, int64_t tokens, int64_t rows, const AttentionPlan& plan) {
  const int64_t row_size = args.heads * args.head_dim * size_of(args.dtype), used = args.query_starts[rows];
  std::memset(static_cast<uint8_t*>(args.out) + used * row_size, 0, (tokens - used) * row_size);
  run_attention(kernels, args, plan);
}

void attention(Tensor out, const Tensor q, const Tensor cache, const Tensor block_tables, const Tensor query_starts,
               const Tensor seq_lens, int64_t head_dim, int64_t window, double scale, double soft_cap,
               const std::optional<Tensor> alibi_slopes, const std::optional<Tensor> sinks) {
  const Cache paged(cache, head_dim);
  STD_TORCH_CHECK(q.dim() == 3 && q.size(2) == head_dim, "q must be [tokens, heads, ", head_dim, "]");
  check_dense(q, "q");
  check_dense(out, "out");
  STD_TORCH_CHECK(out.numel() == q.numel() && out.scalar_type() == q.scalar_type(), "out must match q");
  AttentionArgs args = attention_args(paged, q.size(0), q.size(1), head_dim, block_tables, query_starts, seq_lens, window,
                                      scale, soft_cap, alibi_slopes, sinks);
  args.q = q.const_data_ptr();
  args.dtype = float_type(q, "q");
  args.out = out.mutable_data_ptr();
  attend(choose_kernels(), args, q.size(0), seq_lens.numel(), plan_attention(args, seq_lens.numel()));
}

void gate(Tensor out, const Tensor x, int64_t activation) {
  STD_TORCH_CHECK(activation_of(activation) != Activation::none, "a gate needs an activation");
  check_dense(x, "x");
  check_dense(out, "out");
  const int64_t n = out.size(out.dim() - 1), rows = out.numel() / std::max<int64_t>(n, 1);
  STD_TORCH_CHECK(x.numel() == 2 * out.numel() && x.scalar_type() == out.scalar_type(), "x must be twice as wide as out");
  const GateArgs args{x.const_data_ptr(), out.mutable_data_ptr(), float_type(x, "x"), n, Activation(activation)};
  run_gate(choose_kernels(), args, rows);
}

// Logits [rows, vocab] of a sampler's ops.
Rows logit_rows(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.size(1) <= INT32_MAX, "logits must be [rows, vocab]");
  const Rows rows = matrix(logits, "logits", logits.size(1));
  STD_TORCH_CHECK(rows.dtype == DType::f32, "logits must be float32");
  return rows;
}

void sample(Tensor tokens, const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p,
            const Tensor min_p, const Tensor uniforms) {
  const Rows in = logit_rows(logits);
  STD_TORCH_CHECK(tokens.numel() == in.rows && top_k.numel() == in.rows, "tokens and top_k must be [", in.rows, "]");
  STD_TORCH_CHECK(uniforms.scalar_type() == ScalarType::Double && uniforms.numel() == in.rows && uniforms.is_contiguous(),
                  "uniforms must be float64 [", in.rows, "]");
  integers(tokens, "tokens");
  SampleArgs args{};
  args.logits = static_cast<const float*>(in.data), args.stride = in.stride, args.vocab = logits.size(1);
  args.temperature = floats(temperature, "temperature", in.rows);
  args.top_k = integers(top_k, "top_k");
  args.top_p = floats(top_p, "top_p", in.rows), args.min_p = floats(min_p, "min_p", in.rows);
  args.uniforms = static_cast<const double*>(uniforms.const_data_ptr());
  for (int64_t i = 0; i < in.rows; ++i) {
    STD_TORCH_CHECK(args.temperature[i] >= 0 && args.temperature[i] < __builtin_inff(), "temperature is ", args.temperature[i]);
    STD_TORCH_CHECK(args.top_p[i] > 0, "top_p is ", args.top_p[i]);
    STD_TORCH_CHECK(args.min_p[i] <= 1, "min_p is ", args.min_p[i]);
    STD_TORCH_CHECK(args.uniforms[i] >= 0 && args.uniforms[i] < 1, "uniforms must be in [0, 1), one is ", args.uniforms[i]);
  }
  args.tokens = static_cast<int32_t*>(tokens.mutable_data_ptr());
  run_sample(choose_kernels(), args, in.rows);
}

void mask(Tensor logits, const Tensor masks) {
  const Rows rows = logit_rows(logits);
  const int64_t vocab = logits.size(1), words = (vocab + 31) / 32;
  const int32_t* bits = integers(masks, "masks");
  STD_TORCH_CHECK(masks.numel() == rows.rows * words, "masks must be [", rows.rows, ", ", words, "]");
  run_mask(choose_kernels(), {static_cast<float*>(logits.mutable_data_ptr()), rows.stride, vocab, bits}, rows.rows);
}

// A matrix of every layer; `formats` has four a layer, of which it is number `which`.
std::vector<Weight> matrices(const std::vector<Tensor>& weights, const std::vector<int64_t>& formats, size_t which,
                             int64_t n, int64_t k) {
  std::vector<Weight> result;
  for (size_t i = 0; i < weights.size(); ++i) result.push_back(packed(weights[i], formats[4 * i + which], n, k));
  return result;
}

// A vector of every layer: [layers, size] of float32, or null.
struct Vectors {
  const float* first;
  int64_t size;

  Vectors(const std::optional<Tensor>& tensor, const char* name, int64_t layers, int64_t size)
      : first(floats(tensor, name, layers * size)), size(size) {}
  const float* operator[](int64_t layer) const { return first ? first + layer * size : nullptr; }
};

// Decoder layers in one call. In each, residual [T, hidden] += x (if there is one yet), then attention; += that, then
// the MLP, whose output is the new x: what the next layer adds. `formats` are those of qkv, o, gate_up and down, layer
// by layer; norms, biases and `windows` (0: none) have an entry for every layer.
void layers(Tensor residual, Tensor x, bool has_x, const Tensor attn_norm, const std::vector<Tensor> qkv,
            const std::optional<Tensor> qkv_bias, const std::optional<Tensor> q_norm, const std::optional<Tensor> k_norm,
            const std::vector<Tensor> o, const std::optional<Tensor> o_bias, const Tensor mlp_norm,
            const std::vector<Tensor> gate_up, const std::optional<Tensor> gate_up_bias, const std::vector<Tensor> down,
            const std::optional<Tensor> down_bias, const std::optional<Tensor> rotary, const Tensor slots,
            const Tensor block_tables, const Tensor query_starts, const Tensor seq_lens, Tensor cache,
            std::vector<int64_t> formats, std::vector<int64_t> windows, int64_t heads, int64_t head_dim,
            int64_t intermediate, int64_t activation, double eps, double scale) {
  const Cache paged(cache, head_dim);
  const int64_t count = paged.layers;
  for (const size_t size : {qkv.size(), o.size(), gate_up.size(), down.size(), windows.size(), formats.size() / 4})
    STD_TORCH_CHECK(int64_t(size) == count, "the cache is of ", count, " layers; weights, windows or formats are of ", size);
  STD_TORCH_CHECK(heads <= kMaxSize && intermediate <= kMaxSize / 2, heads, " heads or ", intermediate, " is beyond ", kMaxSize);
  STD_TORCH_CHECK(heads > 0 && activation_of(activation) != Activation::none, "layers without heads or gate");
  STD_TORCH_CHECK(intermediate > 0 && intermediate % kPanel == 0, "intermediate is ", intermediate, ", not a multiple of ", kPanel);
  const int64_t tokens = residual.size(0), hidden = residual.size(1), q_size = heads * head_dim;
  const int64_t qkv_size = q_size + 2 * paged.kv_heads * head_dim, rows = seq_lens.numel();
  const Rows sum = matrix(residual, "residual", hidden), delta = matrix(x, "x", hidden);
  check_dense(residual, "residual");
  check_dense(x, "x");
  STD_TORCH_CHECK(delta.rows == tokens && delta.dtype == sum.dtype, "x must match residual");
  const auto qkv_weights = matrices(qkv, formats, 0, qkv_size, hidden), o_weights = matrices(o, formats, 1, hidden, q_size);
  const auto gate_up_weights = matrices(gate_up, formats, 2, 2 * intermediate, hidden);
  const auto down_weights = matrices(down, formats, 3, hidden, intermediate);
  const Vectors attn_norms(attn_norm, "attn_norm", count, hidden), mlp_norms(mlp_norm, "mlp_norm", count, hidden);
  const Vectors q_norms(q_norm, "q_norm", count, head_dim), k_norms(k_norm, "k_norm", count, head_dim);
  const Vectors qkv_biases(qkv_bias, "qkv_bias", count, qkv_size), o_biases(o_bias, "o_bias", count, hidden);
  const Vectors gate_up_biases(gate_up_bias, "gate_up_bias", count, 2 * intermediate);
  const Vectors down_biases(down_bias, "down_bias", count, hidden);
  for (const int64_t window : windows) STD_TORCH_CHECK(window >= 0, "window is ", window);
  RopeArgs rope = rope_args(paged, tokens, heads, head_dim, rotary, slots, eps, false);
  AttentionArgs attention = attention_args(paged, tokens, heads, head_dim, block_tables, query_starts, seq_lens, 0, scale,
                                           0, std::nullopt, std::nullopt);
  if (!tokens) return;

  const Kernels& kernels = choose_kernels();
  NormArgs norm{};
  norm.residual = sum.data;
  norm.dtype = rope.dtype = attention.dtype = sum.dtype;
  norm.n = norm.stride = hidden;
  norm.eps = float(eps);
  std::vector<std::pair<int64_t, AttentionPlan>> plans;  // of every window there is
  const auto plan_of = [&](int64_t window) -> const AttentionPlan& {
    for (const auto& [known, plan] : plans)
      if (known == window) return plan;
    attention.window = window;
    return plans.emplace_back(window, plan_attention(attention, rows)).second;
  };
  const auto add_and_norm = [&](bool add, const float* weight, const Rows& out) {
    norm.x = add ? delta.data : nullptr;
    norm.sum = add ? sum.data : nullptr;
    norm.out = out.data;
    norm.weight = weight;
    run_norm(kernels, norm, tokens);
  };
  for (int64_t i = 0; i < count; ++i) {
    const auto fresh = [&](Arena& arena, int64_t columns) {
      return Rows{arena.take(tokens * columns * size_of(sum.dtype)), sum.dtype, tokens, columns};
    };
    {
      Arena arena;
      const Rows normed = fresh(arena, hidden), projected = fresh(arena, qkv_size), q = fresh(arena, q_size);
      add_and_norm(has_x || i, attn_norms[i], normed);
      run_linear(kernels, normed, qkv_weights[i], qkv_biases[i], Activation::none, projected, arena);
      rope.qkv = projected.data;
      rope.q = q.data;
      rope.q_norm = q_norms[i], rope.k_norm = k_norms[i];
      rope.keys = paged.keys + i * paged.layer_bytes, rope.values = paged.values + i * paged.layer_bytes;
      run_rope(kernels, rope, tokens);
      attention.q = q.data;
      attention.out = projected.data;  // its queries, keys and values have been taken
      attention.keys = rope.keys, attention.values = rope.values;
      attention.window = windows[i];
      attend(kernels, attention, tokens, rows, plan_of(windows[i]));
      const Rows attended{projected.data, sum.dtype, tokens, q_size};
      run_linear(kernels, attended, o_weights[i], o_biases[i], Activation::none, delta, arena);
    }
    Arena arena;
    const Rows normed = fresh(arena, hidden), gated = fresh(arena, intermediate);
    add_and_norm(true, mlp_norms[i], normed);
    run_linear(kernels, normed, gate_up_weights[i], gate_up_biases[i], Activation(activation), gated, arena);
    run_linear(kernels, gated, down_weights[i], down_biases[i], Activation::none, delta, arena);
  }
}

}  // namespace
}  // namespace pagefleet

STABLE_TORCH_LIBRARY(pagefleet_cpu, m) {
  m.def("pack(Tensor rows, int format, int n, int k, Tensor(a!) out) -> ()");
  m.def("linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, int format, int n, int k, int gate) -> ()");
  m.def("gather(Tensor(a!) out, Tensor ids, Tensor weight, int format, int n, int k) -> ()");
  m.def("norm(Tensor(a!) out, Tensor? x, Tensor(b!) residual, Tensor weight, Tensor? bias, float eps, bool layer_norm) -> ()");
  m.def(
      "rope(Tensor(a!) q, Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor? rotary, Tensor slots, Tensor(b!) cache, "
      "float eps, int head_dim, bool interleaved) -> ()");
  m.def(
      "attention(Tensor(a!) out, Tensor q, Tensor cache, Tensor block_tables, Tensor query_starts, Tensor seq_lens, "
      "int head_dim, int window, float scale, float soft_cap, Tensor? alibi_slopes, Tensor? sinks) -> ()");
  m.def("gate(Tensor(a!) out, Tensor x, int activation) -> ()");
  m.def(
      "sample(Tensor(a!) tokens, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
      "Tensor uniforms) -> ()");
  m.def("mask(Tensor(a!) logits, Tensor masks) -> ()");
  m.def(
      "layers(Tensor(a!) residual, Tensor(b!) x, bool has_x, Tensor attn_norm, Tensor[] qkv, Tensor? qkv_bias, "
      "Tensor? q_norm, Tensor? k_norm, Tensor[] o, Tensor? o_bias, Tensor mlp_norm, Tensor[] gate_up, "
      "Tensor? gate_up_bias, Tensor[] down, Tensor? down_bias, Tensor? rotary, Tensor slots, Tensor block_tables, "
      "Tensor query_starts, Tensor seq_lens, Tensor(c!) cache, int[] formats, int[] windows, int heads, int head_dim, "
      "int intermediate, int activation, float eps, float scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pagefleet_cpu, CPU, m) {
  m.impl("pack", TORCH_BOX(&pagefleet::pack_weight));
  m.impl("linear", TORCH_BOX(&pagefleet::linear));
  m.impl("gather", TORCH_BOX(&pagefleet::gather));
  m.impl("norm", TORCH_BOX(&pagefleet::norm));
  m.impl("rope", TORCH_BOX(&pagefleet::rope));
  m.impl("attention", TORCH_BOX(&pagefleet::attention));
  m.impl("gate", TORCH_BOX(&pagefleet::gate));
  m.impl("sample", TORCH_BOX(&pagefleet::sample));
  m.impl("mask", TORCH_BOX(&pagefleet::mask));
  m.impl("layers", TORCH_BOX(&pagefleet::layers));
}

// What has no tensor to dispatch on, through ctypes.
extern "C" {
#define PF_EXPORT __attribute__((visibility("default")))
PF_EXPORT const char* pagefleet_cpu_isa() { return pagefleet::choose_kernels().isa; }
PF_EXPORT const char* pagefleet_cpu_force_isa(const char* isa) { return pagefleet::force_kernels(isa); }
PF_EXPORT void pagefleet_cpu_set_num_threads(int count) { pagefleet::Pool::instance().set_num_threads(count); }
PF_EXPORT int pagefleet_cpu_num_threads() { return pagefleet::Pool::instance().num_threads(); }
PF_EXPORT int64_t pagefleet_cpu_row_bytes(int format, int64_t k) { return pagefleet::row_bytes(pagefleet::Format(format), k); }
PF_EXPORT int64_t pagefleet_cpu_panel_bytes(int format, int64_t k) {
  return pagefleet::panel_bytes(pagefleet::Format(format), k);
}
}
