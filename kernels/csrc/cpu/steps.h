// The steps of a model, each cut into chunks for the pool. Arguments were checked by the ops (ops.cpp).
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"

namespace pagefleet {

// Memory for the length of one op, kept by the calling thread from op to op: fresh pages would cost more than what is
// computed in them.
class Arena {
 public:
  Arena();   // the calling thread's; one at a time
  ~Arena();
  uint8_t* take(int64_t bytes);

 private:
  struct Block {
    std::unique_ptr<uint8_t[]> memory;
    int64_t size = 0, used = 0;
  };
  static std::vector<Block>& blocks();
};

struct Rows {
  void* data;
  DType dtype;
  int64_t rows, stride;  // elements between rows
};

struct Weight {
  const uint8_t* data;
  Format format;
  int64_t n, k, panel_bytes;
};

void run_linear(const Kernels&, const Rows& x, const Weight&, const float* bias, Activation gate, const Rows& out,
                Arena&);
void run_gather(const Kernels&, const GatherArgs&, int64_t rows);
void run_norm(const Kernels&, const NormArgs&, int64_t rows);
void run_rope(const Kernels&, const RopeArgs&, int64_t tokens);
void run_gate(const Kernels&, const GateArgs&, int64_t rows);
void run_sample(const Kernels&, const SampleArgs&, int64_t rows);
void run_mask(const Kernels&, const MaskArgs&, int64_t rows);

}  // namespace pagefleet
