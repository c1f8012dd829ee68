#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kNoiseRange = 26.1;  // the noise lies in [−3.14, 22.88]: a token further below the best cannot win
constexpr int64_t kSortedAtOnce = 32;
constexpr int64_t kNucleusGuess = 1024;
constexpr int64_t kScanBlock = 32;

// One row's work arrays, in the thread's scratch.
struct Row {
  const KernelTable& table;
  float* x;         // [vocab]
  float* values;    // [vocab]
  int32_t* indices; // [vocab]
  int64_t vocab;

  static size_t bytes(int64_t vocab) { return static_cast<size_t>(vocab + 16) * 12; }
  Row(const KernelTable& t, uint8_t* scratch, int64_t n)
      : table(t), x(reinterpret_cast<float*>(scratch)), values(x + n + 16),
        indices(reinterpret_cast<int32_t*>(values + n + 16)), vocab(n) {}

  // values[0, count) = the elements of y that are >= bound, in order of index; indices beside them.
  int64_t gather_at_least(const float* y, float bound) {
    const int64_t count = table.select_at_least(y, vocab, bound, indices, vocab);
    for (int64_t i = 0; i < count; ++i) values[i] = y[indices[i]];
    return count;
  }

  // A value that at least k elements of y reach: the k-th largest maximum of short blocks. −inf when k is too large.
  float reached_by(const float* y, int64_t k) {
    const int64_t blocks = (vocab + kScanBlock - 1) / kScanBlock;
    if (k > blocks) return -kInfinity;
    bool nan;
    for (int64_t b = 0; b < blocks; ++b)
      values[b] = table.row_max(y + b * kScanBlock, std::min(kScanBlock, vocab - b * kScanBlock), &nan);
    std::nth_element(values, values + (k - 1), values + blocks, std::greater<>());
    return values[k - 1];
  }

  // NaNs are left out; −inf when fewer than k values remain.
  float kth_largest(const float* y, int64_t k) {
    const int64_t count = gather_at_least(y, reached_by(y, k));
    if (count < k) return -kInfinity;
    std::nth_element(values, values + (k - 1), values + count, std::greater<>());
    return values[k - 1];
  }
};

const uint32_t* mask_of(const SamplingArgs& a, int64_t r) {
  return a.mask.bits && a.mask.rows[r] >= 0 ? a.mask.bits + a.mask.rows[r] * a.mask.words : nullptr;
}

void edit(Row& row, const SamplingArgs& a, int64_t r) {
  const float* raw = a.logits + r * a.stride;
  const auto entries = [r](const SparseRows& s, auto visit) {
    if (!s.starts) return;
    for (int32_t i = s.starts[r]; i < s.starts[r + 1]; ++i) visit(i);
  };
  const uint32_t* bits = mask_of(a, r);
  if (a.allowed.starts && a.allowed.starts[r] < a.allowed.starts[r + 1]) {
    std::fill(row.x, row.x + a.vocab, -kInfinity);
    entries(a.allowed, [&](int32_t i) {
      const int32_t id = a.allowed.ids[i];
      if (!bits || bits[id / 32] >> id % 32 & 1) row.x[id] = raw[id];
    });
  } else if (bits) {
    row.table.mask_row(bits, raw, row.x, a.vocab);
  } else {
    std::memcpy(row.x, raw, static_cast<size_t>(a.vocab) * sizeof(float));
  }
  entries(a.banned, [&](int32_t i) { row.x[a.banned.ids[i]] = -kInfinity; });
  entries(a.bias, [&](int32_t i) { row.x[a.bias.ids[i]] += a.bias.values[i]; });
  entries(a.penalties, [&](int32_t i) {
    float& logit = row.x[a.penalties.ids[i]];
    const auto count = static_cast<float>(a.penalties.counts[i]);
    logit = logit > 0.0f ? logit / a.repetition[r] : logit * a.repetition[r];
    logit -= a.frequency[r] * count;
    if (count > 0.0f) logit -= a.presence[r];
  });
}

// Where, from the largest down, the sum of e^(value − best) reaches `target`: the value there, or the least of all.
// Halves the range by sums of the larger part, as quickselect does by counts; the last few are added one by one.
float reach(const KernelTable& table, float* values, int64_t count, double best, double target) {
  double sum = 0.0;  // of all values above the range
  while (count > kSortedAtOnce) {
    const float pivot = std::max(std::min(values[0], values[count / 2]),
                                 std::min(std::max(values[0], values[count / 2]), values[count - 1]));
    float* const equal = std::partition(values, values + count, [pivot](float v) { return v > pivot; });
    float* const below = std::partition(equal, values + count, [pivot](float v) { return v == pivot; });
    const double above = sum + table.sum_exp(values, equal - values, static_cast<float>(best));
    if (above >= target) {
      count = equal - values;
      continue;
    }
    sum = above + static_cast<double>(below - equal) * std::exp(pivot - best);
    if (sum >= target || below == values + count) return pivot;
    count -= below - values;
    values = below;
  }
  std::sort(values, values + count, std::greater<>());
  for (int64_t i = 0; i < count; ++i) {
    sum += std::exp(values[i] - best);
    if (sum >= target) return values[i];
  }
  return values[count - 1];
}

// The value at the first index, from the largest down, at which the probabilities' sum reaches top_p; among the
// elements of row.x that are >= floor. Most nuclei are few tokens: only the largest are looked at, until they do not reach.
double nucleus_bound(Row& row, float best, float floor, float top_p) {
  const int64_t all = row.gather_at_least(row.x, floor);
  const double target = row.table.sum_exp(row.values, all, best) * static_cast<double>(top_p);
  for (const int64_t guess : {kSortedAtOnce, kNucleusGuess}) {
    const float bound = row.reached_by(row.x, guess);
    if (bound <= floor) break;
    const int64_t count = row.gather_at_least(row.x, bound);
    if (row.table.sum_exp(row.values, count, best) >= target) return reach(row.table, row.values, count, best, target);
  }
  return reach(row.table, row.values, row.gather_at_least(row.x, floor), best, target);
}

// The least float that is >= bound.
float at_least(double bound) {
  const auto rounded = static_cast<float>(bound);
  return rounded < bound ? std::nextafter(rounded, kInfinity) : rounded;
}

int32_t sample_row(Row& row, const SamplingArgs& a, int64_t r) {
  const float* x = a.logits + r * a.stride;
  bool nan;
  float best = row.table.row_max(x, a.vocab, &nan);
  if (nan) return -1;
  if (mask_of(a, r) || a.allowed.starts || a.banned.starts || a.bias.starts || a.penalties.starts) {
    edit(row, a, r);
    x = row.x;
    best = row.table.row_max(x, a.vocab, &nan);
  }
  if (nan || best == -kInfinity) return -1;
  int32_t likely;
  row.table.select_at_least(x, a.vocab, best, &likely, 1);
  if (a.temperature[r] == 0.0f) return likely;

  const PointwiseArgs division{x, row.x, 0, 0, a.vocab, a.temperature[r], Activation::silu, nullptr};
  row.table.divide(division, 0, 1);
  best = row.table.row_max(row.x, a.vocab, &nan);
  row.table.select_at_least(row.x, a.vocab, best, &likely, 1);
  double lowest = static_cast<double>(best) - kNoiseRange;
  float floor = -kInfinity;
  if (a.top_k[r] > 0 && a.top_k[r] < a.vocab) {
    floor = row.kth_largest(row.x, a.top_k[r]);
    lowest = std::max<double>(lowest, floor);
  }
  if (a.top_p[r] < 1.0f) lowest = std::max(lowest, nucleus_bound(row, best, floor, a.top_p[r]));
  if (a.min_p[r] > 0.0f) lowest = std::max(lowest, best + std::log(static_cast<double>(a.min_p[r])));
  return row.table.gumbel_argmax(row.x, a.vocab, at_least(lowest), likely, a.seed[r],
                                 static_cast<uint32_t>(a.output_position[r]),
                                 static_cast<uint32_t>(a.choice_index[r]));
}

class SampleOp final : public Op {
 public:
  SampleOp(const KernelTable& table, const SamplingArgs& args) : table_(table), args_(args) {}
  size_t local_bytes() const override { return Row::bytes(args_.vocab); }
  void run(Team& team) override {
    team.parallel(args_.rows, [&](Worker& worker, int64_t r) {
      Row row(table_, worker.local, args_.vocab);
      args_.tokens[r] = sample_row(row, args_, r);
    });
  }

 private:
  const KernelTable& table_;
  SamplingArgs args_;
};

class LogprobsOp final : public Op {
 public:
  LogprobsOp(const KernelTable& table, const LogprobsArgs& args) : table_(table), args_(args) {}
  size_t local_bytes() const override { return Row::bytes(args_.vocab); }
  void run(Team& team) override {
    team.parallel(args_.rows, [&](Worker& worker, int64_t r) {
      Row row(table_, worker.local, args_.vocab);
      fill_row(row, r);
    });
  }

 private:
  void fill_row(Row& row, int64_t r) const {
    const float* x = args_.logits + r * args_.stride;
    bool nan;
    const float best = table_.row_max(x, args_.vocab, &nan);
    const double normaliser = best + std::log(table_.sum_exp(x, args_.vocab, best));
    const int32_t token = args_.token_ids[r];
    const float value = x[token];
    args_.logprob[r] = static_cast<float>(value - normaliser);
    // rank: those above, and the equal ones before it
    const int64_t reaching = table_.select_at_least(x, args_.vocab, value, row.indices, args_.vocab);
    int32_t rank = 1;
    for (int64_t i = 0; i < reaching; ++i) rank += x[row.indices[i]] > value || row.indices[i] < token;
    args_.rank[r] = rank;
    if (args_.top > 0) fill_top(row, x, r, normaliser);
  }

  void fill_top(Row& row, const float* x, int64_t r, double normaliser) const {
    int64_t count = row.gather_at_least(x, row.kth_largest(x, args_.top));
    for (int32_t i = 0; count < args_.top; ++i)  // a row with NaNs: any order does, as long as it is one
      if (std::isnan(x[i])) row.indices[count++] = i;
    std::partial_sort(row.indices, row.indices + args_.top, row.indices + count, [x](int32_t i, int32_t j) {
      const bool numbers = !std::isnan(x[i]) && !std::isnan(x[j]);
      return numbers && x[i] != x[j] ? x[i] > x[j] : numbers || std::isnan(x[i]) == std::isnan(x[j]) ? i < j
                                                                                                     : std::isnan(x[j]);
    });
    for (int64_t j = 0; j < args_.top; ++j) {
      args_.top_ids[r * args_.top + j] = row.indices[j];
      args_.top_logprobs[r * args_.top + j] = static_cast<float>(x[row.indices[j]] - normaliser);
    }
  }

  const KernelTable& table_;
  LogprobsArgs args_;
};

}  // namespace

std::unique_ptr<Op> sample_op(const KernelTable& table, const SamplingArgs& args) {
  return std::make_unique<SampleOp>(table, args);
}

std::unique_ptr<Op> logprobs_op(const KernelTable& table, const LogprobsArgs& args) {
  return std::make_unique<LogprobsOp>(table, args);
}

}  // namespace octavo
