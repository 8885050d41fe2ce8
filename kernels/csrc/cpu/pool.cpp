#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <new>

namespace pagefleet {
namespace {

constexpr auto kSpin = std::chrono::microseconds(200);  // a worker sleeps after it: longer than a gap between ops

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

alignas(Pool) unsigned char storage[sizeof(Pool)];  // never destroyed: workers outlive main()'s statics

}  // namespace

Pool& Pool::instance() {
  static Pool* pool = [] {
    pthread_atfork(nullptr, nullptr, &Pool::after_fork);
    return new (storage) Pool;
  }();
  return *pool;
}

// A forked child has the memory but not the workers: it starts with a pool of its own.
void Pool::after_fork() {
  Pool& pool = *reinterpret_cast<Pool*>(storage);
  const int threads = pool.num_threads();
  Pool* fresh = new (storage) Pool;  // what the old one held belonged to threads that are gone
  fresh->num_threads_.store(threads, std::memory_order_relaxed);
}

void Pool::set_num_threads(int count) {
  std::lock_guard<std::mutex> turn(jobs_);
  num_threads_.store(count < 1 ? 1 : count, std::memory_order_relaxed);
}

void Pool::start_workers() {
  const int wanted = num_threads() - 1;
  if (int(workers_.size()) == wanted) return;
  stop_workers();
  for (int i = 0; i < wanted; ++i) workers_.emplace_back([this, i] { worker(i + 1); });
}

void Pool::stop_workers() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& thread : workers_) thread.join();
  workers_.clear();
  stopping_ = false;
}

void Pool::run_job(int64_t items, int64_t grain, void* context, Function function) {
  if (items <= 0) return;
  const int64_t chunks = (items + grain - 1) / grain;
  if (chunks == 1 || num_threads() == 1) {
    function(context, 0, items, 0);
    return;
  }
  std::lock_guard<std::mutex> turn(jobs_);
  start_workers();
  // closed first: a late worker that still knows the last job could otherwise read the new fields and take a chunk
  const uint32_t closed = uint32_t(ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(uint64_t(closed) << 32 | 0xffffffffu);
  items_.store(items, std::memory_order_release);
  grain_.store(grain, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  function_.store(function, std::memory_order_release);
  remaining_.store(chunks, std::memory_order_relaxed);
  const uint32_t generation = uint32_t(ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(uint64_t(generation) << 32);
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  work(generation, 0);
  for (int spins = 0; remaining_.load(std::memory_order_acquire) > 0; ++spins) {
    pause();
    if (spins > 4000) sched_yield();  // whoever has the last chunk may be waiting for this very core
  }
}

void Pool::work(uint32_t generation, int thread) {
  for (;;) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (uint32_t(ticket >> 32) != generation) return;
    const int64_t items = items_.load(std::memory_order_acquire), grain = grain_.load(std::memory_order_acquire);
    const auto function = function_.load(std::memory_order_acquire);
    void* context = context_.load(std::memory_order_acquire);
    const int64_t begin = int64_t(uint32_t(ticket)) * grain;
    if (begin >= items) return;
    // if the ticket is still there, its chunk was not done, so the job was not over and its fields are those read
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    function(context, begin, begin + grain < items ? begin + grain : items, thread);
    remaining_.fetch_sub(1, std::memory_order_release);
  }
}

void Pool::worker(int thread) {
  uint32_t seen = 0;
  const auto generation = [this] { return uint32_t(ticket_.load() >> 32); };
  while (!stopping_) {
    auto deadline = std::chrono::steady_clock::now() + kSpin;
    for (int spins = 1; generation() == seen && !stopping_; ++spins) {
      pause();
      if (spins % 64 == 0 && std::chrono::steady_clock::now() > deadline) {
        std::unique_lock<std::mutex> lock(sleep_);
        ++sleepers_;
        wake_.wait(lock, [&] { return generation() != seen || stopping_; });
        --sleepers_;
      }
    }
    seen = generation();
    work(seen, thread);
  }
}

}  // namespace pagefleet
