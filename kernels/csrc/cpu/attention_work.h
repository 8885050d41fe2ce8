// How attention over a batch is cut into items for threads. No result depends on it: see attention.h.
#pragma once

#include <vector>

#include "kernels.h"

namespace pagefleet {

struct AttentionPlan {
  std::vector<AttentionWork> items;   // the longest first
  std::vector<AttentionWork> merges;  // of the rows whose parts are several items
  int64_t num_partials = 0;
};

// `window` 0: none. Rows without query tokens get no items.
AttentionPlan split_attention(int64_t num_rows, const int32_t* query_starts, const int32_t* seq_lens, int64_t kv_heads,
                              int64_t window, int64_t num_threads);

// For the pool's threads; layers with one window share it.
AttentionPlan plan_attention(const AttentionArgs& args, int64_t num_rows);

// All of it on the pool: items, then merges. `args` lacks only work and partials.
void run_attention(const Kernels& kernels, AttentionArgs args, const AttentionPlan& plan);

}  // namespace pagefleet
