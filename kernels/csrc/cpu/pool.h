// Threads that share one job's chunks. The caller works too, and returns when every chunk is done: a worker that the
// operating system has taken off its core before it took a chunk is not waited for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace pagefleet {

class Pool {
 public:
  static Pool& instance();

  // Threads that work on a job, the caller included. Takes effect with the next job.
  void set_num_threads(int count);
  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  // body(begin, end, thread) over [0, items), `grain` at a time, each chunk by whoever is free. Jobs of several
  // callers take turns. `body` must not throw.
  template <class Body>
  void run(int64_t items, int64_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_job(items, grain, const_cast<void*>(static_cast<const void*>(&body)),
            [](void* context, int64_t begin, int64_t end, int thread) {
              (*static_cast<Plain*>(context))(begin, end, thread);
            });
  }

 private:
  using Function = void (*)(void*, int64_t, int64_t, int);

  void run_job(int64_t items, int64_t grain, void* context, Function function);
  void work(uint32_t generation, int thread);
  void worker(int thread);
  void start_workers();
  void stop_workers();
  static void after_fork();

  std::mutex jobs_;  // held for the length of a job
  std::atomic<int> num_threads_{1};

  // The job. Its fields are written while none runs; `ticket_` is its generation and the next chunk, in one word, so
  // that a worker coming late can take nothing of a job it does not know.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> remaining_{0};  // chunks that are not done
  std::atomic<int64_t> items_{0}, grain_{1};
  std::atomic<void*> context_{nullptr};
  std::atomic<Function> function_{nullptr};

  std::vector<std::thread> workers_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace pagefleet
