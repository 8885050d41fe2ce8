#include "attention_work.h"

#include <algorithm>
#include <memory>
#include <new>

#include "pool.h"

namespace pagefleet {
namespace {

constexpr int64_t kItemsPerThread = 4;  // as many chances to even out what items really take
constexpr int64_t kTokenCost = 2;       // reading a key, in query tokens it could have been multiplied with
constexpr int64_t kFewQueries = 16;     // fewer would read keys too often

// Query tokens of one row, for one key head yet to be named.
struct Piece {
  int64_t row, first_query, num_queries;
  int64_t first_part, num_parts;
  int64_t cost_of_part;

  int64_t cost() const { return cost_of_part * num_parts; }
};

// Memory that a thread keeps from call to call: fresh pages would cost more than what is computed in them.
class Kept {
 public:
  uint8_t* at_least(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      memory_.reset(static_cast<uint8_t*>(::operator new[](bytes, std::align_val_t(64))));
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<uint8_t[], Free> memory_;
  int64_t size_ = 0;
};

thread_local Kept scratch, partials;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::vector<Piece> cut_queries(int64_t num_rows, const int32_t* query_starts, const int32_t* seq_lens, int64_t window,
                               int64_t max_queries) {
  std::vector<Piece> pieces;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t end = query_starts[row + 1];
    for (int64_t first = query_starts[row]; first < end; first += max_queries) {
      const int64_t count = std::min(max_queries, end - first);
      const int64_t first_position = seq_lens[row] - (end - first), last_position = first_position + count - 1;
      const int64_t begin = window ? std::max<int64_t>(first_position - window + 1, 0) : 0;
      const int64_t first_part = begin / kKeyPart, end_part = divide_up(last_position + 1, kKeyPart);
      const int64_t parts = std::max<int64_t>(end_part - first_part, 0);
      const int64_t keys = std::max<int64_t>(last_position + 1 - begin, 1);
      const int64_t cost_of_part = divide_up(keys, std::max<int64_t>(parts, 1)) * (count + kTokenCost);
      pieces.push_back({row, first, count, first_part, parts, cost_of_part});
    }
  }
  return pieces;
}

// Items of a piece: one, or several runs of parts and the merge of them.
void add_items(const Piece& piece, int64_t kv_heads, int64_t parts_of_item, AttentionPlan& plan) {
  const bool split = parts_of_item < piece.num_parts;
  for (int64_t head = 0; head < kv_heads; ++head) {
    AttentionWork item{int32_t(piece.row),         int32_t(head),
                       int32_t(piece.first_query), int32_t(piece.num_queries),
                       int32_t(piece.first_part),  int32_t(piece.num_parts),
                       split ? int32_t(plan.num_partials) : -1};
    if (!split) {
      plan.items.push_back(item);
      continue;
    }
    plan.merges.push_back(item);
    for (int64_t done = 0; done < piece.num_parts; done += parts_of_item) {
      item.first_part = int32_t(piece.first_part + done);
      item.num_parts = int32_t(std::min(parts_of_item, piece.num_parts - done));
      item.partial = int32_t(plan.num_partials + done * piece.num_queries);
      plan.items.push_back(item);
    }
    plan.num_partials += piece.num_parts * piece.num_queries;
  }
}

}  // namespace

AttentionPlan split_attention(int64_t num_rows, const int32_t* query_starts, const int32_t* seq_lens, int64_t kv_heads,
                              int64_t window, int64_t num_threads) {
  const int64_t wanted = num_threads > 1 ? num_threads * kItemsPerThread : 1;
  int64_t max_queries = kMaxQueries;
  auto pieces = cut_queries(num_rows, query_starts, seq_lens, window, max_queries);
  while (int64_t(pieces.size()) * kv_heads < wanted && max_queries > kFewQueries) {
    max_queries /= 2;
    pieces = cut_queries(num_rows, query_starts, seq_lens, window, max_queries);
  }
  int64_t total = 0;
  for (const Piece& piece : pieces) total += piece.cost() * kv_heads;
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.cost() > b.cost(); });
  AttentionPlan plan;
  for (const Piece& piece : pieces) {
    const int64_t share = std::max<int64_t>(divide_up(total, wanted), 1);  // an item of more than it is cut
    const int64_t items = std::min(divide_up(piece.cost(), share), std::max<int64_t>(piece.num_parts, 1));
    add_items(piece, kv_heads, std::max<int64_t>(divide_up(piece.num_parts, items), 1), plan);
  }
  return plan;
}

AttentionPlan plan_attention(const AttentionArgs& args, int64_t num_rows) {
  const int threads = Pool::instance().num_threads();
  return split_attention(num_rows, args.query_starts, args.seq_lens, args.kv_heads, args.window, threads);
}

void run_attention(const Kernels& kernels, AttentionArgs args, const AttentionPlan& plan) {
  Pool& pool = Pool::instance();
  const int64_t bytes = plan.num_partials * (args.heads / args.kv_heads) * partial_floats(args.head_dim) * 4;
  args.partials = reinterpret_cast<float*>(partials.at_least(bytes));
  args.work = plan.items.data();
  const int64_t scratch_bytes = kernels.attention_scratch(args);
  pool.run(int64_t(plan.items.size()), 1, [&](int64_t begin, int64_t end, int) {
    kernels.attention(args, begin, end, scratch.at_least(scratch_bytes));
  });
  const MergeArgs merge{&args, plan.merges.data()};
  pool.run(int64_t(plan.merges.size()), 1, [&](int64_t begin, int64_t end, int) { kernels.merge(merge, begin, end); });
}

}  // namespace pagefleet
