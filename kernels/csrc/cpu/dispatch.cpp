// Which instruction set's kernels run: the best that the processor has, or the one that was asked for.
#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstring>

namespace pagefleet {

extern const Kernels kernels_scalar;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512bf16;
#endif

namespace {

struct Unit {
  const Kernels* kernels;
  bool (*runs)();
};

bool always() { return true; }

#if defined(__x86_64__) && !defined(PAGEFLEET_SCALAR_ONLY)
bool has_f16c() {  // by its own bit: clang 14 does not know the name
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
const Unit units[] = {{&kernels_avx512bf16, has_avx512bf16},
                      {&kernels_avx512, has_avx512},
                      {&kernels_avx2, has_avx2},
                      {&kernels_scalar, always}};
#else
const Unit units[] = {{&kernels_scalar, always}};
#endif

const Kernels* best() {
  for (const Unit& unit : units)
    if (unit.runs()) return unit.kernels;
  return &kernels_scalar;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& choose_kernels() {
  const Kernels* kernels = chosen.load(std::memory_order_relaxed);
  if (!kernels) chosen.store(kernels = best(), std::memory_order_relaxed);
  return *kernels;
}

const char* force_kernels(const char* isa) {
  if (!*isa) {
    chosen.store(best(), std::memory_order_relaxed);
    return nullptr;
  }
  for (const Unit& unit : units) {
    if (std::strcmp(unit.kernels->isa, isa)) continue;
    if (!unit.runs()) return "this processor does not have it";
    chosen.store(unit.kernels, std::memory_order_relaxed);
    return nullptr;
  }
  return "this build has no such unit";
}

}  // namespace pagefleet
