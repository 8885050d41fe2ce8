#include "steps.h"

#include <algorithm>

#include "pool.h"

namespace pagefleet {
namespace {

constexpr int64_t kRowBlock = 48;     // rows of one chunk of a product: a multiple of every tile, 110 KB of float32
constexpr int64_t kSerial = 1 << 14;  // elements that one thread is through with before another has woken up
constexpr int64_t kAlign = 64;

template <class Body>
void over_rows(int64_t rows, int64_t columns, Body&& body) {
  const int64_t grain = std::max<int64_t>(1, kSerial / 2 / std::max<int64_t>(1, columns));
  if (rows * columns <= kSerial) body(0, rows, 0);
  else Pool::instance().run(rows, grain, body);
}

// Rows of x as the format multiplies with them: x itself where it already is that, else a copy in the arena.
const uint8_t* prepare(const Kernels& kernels, const Rows& x, const Weight& weight, Arena& arena, int64_t& stride) {
  if (x.dtype == DType::f32 && (weight.format == Format::f32 || weight.format == Format::f16)) {
    stride = x.stride * 4;
    return static_cast<const uint8_t*>(x.data);
  }
  stride = kernels.prepared_bytes(weight.format, weight.k);
  uint8_t* out = arena.take(x.rows * stride);
  const PrepareArgs args{x.data, x.dtype, x.stride, weight.k, weight.format, out, stride};
  over_rows(x.rows, weight.k, [&](int64_t begin, int64_t end, int) { kernels.prepare(args, begin, end); });
  return out;
}

}  // namespace

std::vector<Arena::Block>& Arena::blocks() {
  thread_local std::vector<Block> blocks;
  return blocks;
}

// What the last op needed in several blocks is one block from now on.
Arena::Arena() {
  auto& all = blocks();
  if (all.size() > 1) {
    int64_t total = 0;
    for (const Block& block : all) total += block.size;
    all.clear();
    all.push_back({std::unique_ptr<uint8_t[]>(new uint8_t[total]), total, 0});
  }
}

Arena::~Arena() {
  for (Block& block : blocks()) block.used = 0;
}

uint8_t* Arena::take(int64_t bytes) {
  auto& all = blocks();
  const int64_t needed = bytes + kAlign;
  if (all.empty() || all.back().size - all.back().used < needed) {
    const int64_t size = std::max(needed, int64_t(1) << 16);
    all.push_back({std::unique_ptr<uint8_t[]>(new uint8_t[size]), size, 0});
  }
  Block& block = all.back();
  uint8_t* start = block.memory.get() + block.used;
  block.used += needed;
  return start + (-reinterpret_cast<uintptr_t>(start) & (kAlign - 1));
}

// Chunks: the panels of one stay in the second-level cache while its rows pass; a single block of rows is cut finer.
void run_linear(const Kernels& kernels, const Rows& x, const Weight& weight, const float* bias, Activation gate,
                const Rows& out, Arena& arena) {
  LinearArgs args{};
  args.a = prepare(kernels, x, weight, arena, args.a_stride);
  args.weight = weight.data;
  args.panel_bytes = weight.panel_bytes;
  args.format = weight.format;
  args.n = weight.n;
  args.k = weight.k;
  args.bias = bias;
  args.gate = gate;
  args.out = out.data;
  args.out_dtype = out.dtype;
  args.out_stride = out.stride;
  Pool& pool = Pool::instance();
  const int64_t panels = (weight.n + kPanel - 1) / kPanel / (gate == Activation::none ? 1 : 2);
  const int64_t blocks = (x.rows + kRowBlock - 1) / kRowBlock;
  const int64_t wanted = blocks > 1 ? 8 : panels / (8 * pool.num_threads());
  const int64_t group = std::max<int64_t>(4, wanted / 4 * 4), groups = (panels + group - 1) / group;
  pool.run(groups * blocks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t panel = chunk / blocks * group, row = chunk % blocks * kRowBlock;
      kernels.linear(args, row, std::min(row + kRowBlock, x.rows), panel, std::min(panel + group, panels));
    }
  });
}

void run_gather(const Kernels& kernels, const GatherArgs& args, int64_t rows) {
  over_rows(rows, args.k, [&](int64_t begin, int64_t end, int) { kernels.gather(args, begin, end); });
}

void run_norm(const Kernels& kernels, const NormArgs& args, int64_t rows) {
  over_rows(rows, args.n, [&](int64_t begin, int64_t end, int) { kernels.norm(args, begin, end); });
}

void run_rope(const Kernels& kernels, const RopeArgs& args, int64_t tokens) {
  over_rows(tokens, args.stride, [&](int64_t begin, int64_t end, int) { kernels.rope(args, begin, end); });
}

void run_gate(const Kernels& kernels, const GateArgs& args, int64_t rows) {
  over_rows(rows, 2 * args.n, [&](int64_t begin, int64_t end, int) { kernels.gate(args, begin, end); });
}

void run_sample(const Kernels& kernels, const SampleArgs& args, int64_t rows) {
  Pool::instance().run(rows, 1, [&](int64_t begin, int64_t end, int) {
    Arena arena;  // of whichever thread this is
    kernels.sample(args, begin, end, arena.take(kernels.sample_scratch(args.vocab)));
  });
}

void run_mask(const Kernels& kernels, const MaskArgs& args, int64_t rows) {
  over_rows(rows, args.vocab, [&](int64_t begin, int64_t end, int) { kernels.mask(args, begin, end); });
}

}  // namespace pagefleet
