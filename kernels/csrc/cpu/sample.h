// Draws of tokens from rows of logits, and masks of tokens: the sampler of pagefleet/sampler.py, which is the reference.
//
// Rankings are cut without sorting: the value at a cut is found digit by digit of its bits (radix selection), by counts
// for top-k and by sums of weights for top-p. So the time of a draw is bounded whatever the logits are.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace pagefleet::PAGEFLEET_ISA {

constexpr int64_t kWeights = 64;  // that are summed up together
constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;

// A draw's memory: values, the tokens they belong to, and what is left of the values in a search.
static int64_t sample_scratch(int64_t vocab) { return 3 * (vocab + kWeights) * int64_t(sizeof(float)); }

// Candidates of a draw: values, and the tokens they belong to. Zeros up to a whole group follow.
struct Candidates {
  float* values;
  int32_t* ids;
  int64_t count;
  bool all;  // every token is one still, and ids is not filled
};

// Larger floats have larger keys; NaN does not occur.
PF_INLINE uint32_t sortable(float x) {
  x += 0.0f;  // -0 is 0
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

PF_INLINE float value_of(uint32_t key) {  // the float that is so large a key
  const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The best of a ranking, down to a value: everything above it, and the first `ties` of those equal to it.
struct Cut {
  uint32_t key;
  int64_t ties;
};

// Values from the largest down, until `goal` is reached by their number or by their sum. `rest` has room for all of
// them; it may be `values`, which are lost then.
template <bool by_sum>
static Cut find_cut(const float* values, int64_t count, double goal, float* rest) {
  uint32_t prefix = 0;
  double reached = 0;
  for (int shift = 32;;) {
    const int above = shift;
    shift = shift > kDigitBits ? shift - kDigitBits : 0;
    double sums[by_sum ? kDigits : 1] = {};
    int32_t counts[kDigits] = {};
    int64_t matching = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float value = values[i];
      const uint32_t key = sortable(value);
      rest[matching] = value;
      const int64_t matches = above == 32 || (key ^ prefix) >> above == 0;
      matching += matches;
      const uint32_t digit = key >> shift & (kDigits - 1);
      counts[digit] += int32_t(matches);
      if (by_sum) sums[digit] += matches ? double(value) : 0.0;
    }
    const auto measure = [&](int digit) { return by_sum ? sums[digit] : double(counts[digit]); };
    int digit = kDigits - 1, last = -1;  // last: the lowest digit seen, where sums rounded another way end
    for (; digit >= 0; --digit) {
      if (!counts[digit]) continue;
      last = digit;
      if (reached + measure(digit) >= goal) break;
      reached += measure(digit);
    }
    if (digit < 0) digit = last, reached -= measure(last);
    prefix |= uint32_t(digit) << shift;
    values = rest;
    count = matching;
    if (shift) continue;
    const double each = measure(digit) / double(counts[digit]), missing = goal - reached;
    int64_t ties = each > 0 && missing > 0 ? int64_t(__builtin_ceil(missing / each)) : 1;
    if (ties > counts[digit]) ties = counts[digit];
    return {prefix, ties < 1 ? 1 : ties};
  }
}

PF_INLINE void pad_group(Candidates& some) {
  for (int64_t i = some.count; i % kWeights; ++i) some.values[i] = 0;
}

// Leave the values of `from` that are at least `lowest`, in their order; `from` may be the candidates' own values.
static void keep_from(Candidates& some, const float* from, float lowest) {
  int64_t kept = 0, i = 0;
  const auto keep = [&](int64_t at, float value) {
    some.ids[kept] = some.all ? int32_t(at) : some.ids[at];
    some.values[kept++] = value;
  };
  for (; i + kLanes <= some.count; i += kLanes) {
    float lanes[kLanes];
    const vf v = load(from + i);
    if (!any(v >= set1(lowest))) continue;
    store(lanes, v);
    for (int j = 0; j < kLanes; ++j)
      if (lanes[j] >= lowest) keep(i + j, lanes[j]);
  }
  for (; i < some.count; ++i)
    if (from[i] >= lowest) keep(i, from[i]);
  some.count = kept;
  some.all = false;
}

static void keep_cut(Candidates& some, Cut cut) {
  int64_t kept = 0;
  for (int64_t i = 0; i < some.count; ++i) {
    const uint32_t key = sortable(some.values[i]);
    if (key < cut.key || (key == cut.key && cut.ties-- <= 0)) continue;
    some.values[kept] = some.values[i];
    some.ids[kept++] = some.ids[i];
  }
  some.count = kept;
}

// The highest of n logits; NaN if one of them is.
static float highest_of(const float* logits, int64_t n) {
  vf best = set1(-__builtin_inff());
  vi nan = vi{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const vf v = load(logits + i);
    best = max(best, v);
    nan |= v != v;
  }
  float lanes[kLanes], highest = -__builtin_inff();
  bool bad = any(nan);
  store(lanes, best);
  for (float lane : lanes) highest = lane > highest ? lane : highest;
  for (; i < n; ++i) {
    highest = logits[i] > highest ? logits[i] : highest;
    bad |= logits[i] != logits[i];
  }
  return bad ? __builtin_nanf("") : highest;
}

static int64_t first_equal(const float* logits, int64_t n, float value) {
  int64_t i = 0;
  while (i + kLanes <= n && !any(load(logits + i) == set1(value))) i += kLanes;
  while (logits[i] != value) ++i;
  return i;
}

// A lower bound of the k-th highest logit that is cheap to have: so many groups reach it.
static float bound_of_top(const float* logits, int64_t n, int64_t k, float* highest) {
  const int64_t groups = n / kWeights;
  if (k > groups) return -__builtin_inff();
  for (int64_t group = 0; group < groups; ++group) highest[group] = highest_of(logits + group * kWeights, kWeights);
  return value_of(find_cut<false>(highest, groups, double(k), highest).key);
}

PF_INLINE double group_sum(const float* values) {  // in double: a sum rounded up would end beyond the last weight
  double sums[8] = {};
  for (int64_t i = 0; i < kWeights; i += 8)
    for (int64_t j = 0; j < 8; ++j) sums[j] += double(values[i + j]);
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

static double sum_of(const Candidates& some) {
  double total = 0;
  for (int64_t i = 0; i < some.count; i += kWeights) total += group_sum(some.values + i);
  return total;
}

// The first candidate up to which the weights make up more than `share` of their sum; never one of weight 0.
static int64_t at_quantile(const Candidates& some, double share) {
  double rest = share * sum_of(some);
  int64_t start = 0, index = 0;
  for (int64_t i = 0; i < some.count; i += kWeights) {
    const double sum = group_sum(some.values + i);
    if (!(sum > 0)) continue;
    start = i;
    if (rest < sum) break;
    if (i + kWeights < some.count) rest -= sum;
  }
  const int64_t end = start + kWeights < some.count ? start + kWeights : some.count;
  for (int64_t i = start; i < end; ++i) {
    if (!(some.values[i] > 0)) continue;
    index = i;
    rest -= some.values[i];
    if (rest < 0) break;
  }
  return index;
}

static int32_t draw_row(const SampleArgs& args, int64_t row, float* values, int32_t* ids, float* rest) {
  const float* logits = args.logits + row * args.stride;
  const int64_t n = args.vocab, k = args.top_k[row];
  const float highest = highest_of(logits, n), temperature = args.temperature[row];
  if (!(highest > -__builtin_inff())) return -1;
  if (!(temperature > 0)) return int32_t(first_equal(logits, n, highest));

  Candidates some{values, ids, n, true};
  const bool certain = highest == __builtin_inff();  // such tokens share all of the probability
  if (certain) {
    keep_from(some, logits, highest);
    for (int64_t i = 0; i < some.count; ++i) values[i] = 0;
  }
  const float* from = certain ? values : logits;
  if (k > 0 && k < some.count) {
    keep_from(some, from, bound_of_top(from, some.count, k, values));
    keep_cut(some, find_cut<false>(values, some.count, double(k), rest));
    from = values;
  }
  const vf shift = set1(certain ? 0.0f : highest), divisor = set1(temperature);
  int64_t i = 0;
  for (; i + kLanes <= some.count; i += kLanes) store(values + i, exp((load(from + i) - shift) / divisor));
  if (i < some.count) {
    const int left = int(some.count - i);
    store_some(values + i, exp((load_some(from + i, left) - shift) / divisor), left);
  }

  if (args.min_p[row] > 0) keep_from(some, values, args.min_p[row]);
  pad_group(some);
  if (const double share = args.top_p[row]; share < 1) {
    const double total = sum_of(some);
    // all weights below this one together are less than the share to be cut
    const double low = (1 - share) * total / double(some.count);
    keep_from(some, values, float(low * 0.999));
    keep_cut(some, find_cut<true>(values, some.count, share * total, rest));
    pad_group(some);
  }
  const int64_t index = at_quantile(some, args.uniforms[row]);
  return some.all ? int32_t(index) : ids[index];
}

static void sample_rows(const SampleArgs& args, int64_t begin, int64_t end, uint8_t* scratch) {
  const int64_t room = args.vocab + kWeights;
  float *values = (float*)scratch, *rest = values + room;
  int32_t* ids = (int32_t*)(rest + room);
  for (int64_t row = begin; row < end; ++row) args.tokens[row] = draw_row(args, row, values, ids, rest);
}

static void mask_rows(const MaskArgs& args, int64_t begin, int64_t end) {
  const int64_t words = (args.vocab + 31) / 32;
  for (int64_t row = begin; row < end; ++row) {
    float* logits = args.logits + row * args.stride;
    for (int64_t word = 0; word < words; ++word) {
      const uint32_t allowed = uint32_t(args.masks[row * words + word]);
      if (allowed == 0xffffffffu) continue;
      const int64_t first = word * 32, count = args.vocab - first < 32 ? args.vocab - first : 32;
      for (int64_t i = 0; i < count; ++i)
        if (!(allowed >> i & 1)) logits[first + i] = -__builtin_inff();
    }
  }
}

}  // namespace pagefleet::PAGEFLEET_ISA
