// Operations on rows, and moves of memory.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"

namespace octavo {
namespace {

// Rows handed to a thread at once: enough work to be worth the counter, few enough to share out.
int64_t chunk_of(int64_t rows, int64_t width, int threads) {
  const int64_t worthwhile = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, width));
  return std::clamp<int64_t>(rows / (threads * 4), 1, worthwhile);
}

template <typename Body> class RowsOp final : public Op {
 public:
  RowsOp(int64_t rows, int64_t width, Body body) : rows_(rows), width_(width), body_(body) {}
  void run(Team& team) override {
    for_chunks(team, rows_, chunk_of(rows_, width_, team.size()),
               [this](Worker&, int64_t begin, int64_t end) { body_(begin, end); });
  }

 private:
  int64_t rows_, width_;
  Body body_;
};

template <typename Body> std::unique_ptr<Op> rows_op(int64_t rows, int64_t width, Body body) {
  return std::make_unique<RowsOp<Body>>(rows, width, body);
}

class CopyBlocksOp final : public Op {
 public:
  CopyBlocksOp(uint8_t* cache, int64_t bytes, std::vector<int32_t> sources, std::vector<int32_t> targets)
      : cache_(cache), bytes_(bytes), sources_(std::move(sources)), targets_(std::move(targets)) {
    for (const int32_t source : sources_)
      overlap_ = overlap_ || std::find(targets_.begin(), targets_.end(), source) != targets_.end();
  }
  size_t shared_bytes() const override { return overlap_ ? sources_.size() * static_cast<size_t>(bytes_) : 0; }
  void run(Team& team) override {
    const auto count = static_cast<int64_t>(sources_.size());
    const auto block = [&](int32_t id) { return cache_ + id * bytes_; };
    if (!overlap_) {
      team.parallel(count, [&](Worker&, int64_t i) { copy(block(targets_[i]), block(sources_[i])); });
      return;
    }
    team.parallel(count, [&](Worker&, int64_t i) { copy(team.shared() + i * bytes_, block(sources_[i])); });
    team.parallel(count, [&](Worker&, int64_t i) { copy(block(targets_[i]), team.shared() + i * bytes_); });
  }

 private:
  void copy(uint8_t* to, const uint8_t* from) const {
    if (to != from) std::memcpy(to, from, static_cast<size_t>(bytes_));
  }
  uint8_t* cache_;
  int64_t bytes_;
  std::vector<int32_t> sources_, targets_;
  bool overlap_ = false;
};

// Softmax in float32 over all experts, then the top_k; ties to the lowest id.
void route_row(const float* logits, int64_t experts, int64_t top_k, bool normalize, int32_t* ids, float* weights) {
  const float top = *std::max_element(logits, logits + experts);
  float total = 0.0f;
  for (int64_t e = 0; e < experts; ++e) total += std::exp(logits[e] - top);
  for (int64_t j = 0; j < top_k; ++j) {
    int32_t best = -1;
    for (int32_t e = 0; e < experts; ++e)
      if (std::find(ids, ids + j, e) == ids + j && (best < 0 || logits[e] > logits[best])) best = e;
    ids[j] = best;
    weights[j] = std::exp(logits[best] - top) / total;
  }
  if (!normalize) return;
  float sum = 0.0f;
  for (int64_t j = 0; j < top_k; ++j) sum += weights[j];
  for (int64_t j = 0; j < top_k; ++j) weights[j] /= sum;
}

}  // namespace

std::unique_ptr<Op> norm_op(const KernelTable& table, const NormArgs& args, int64_t rows, bool layer_norm) {
  const auto kernel = layer_norm ? table.layer_norm : table.rms_norm;
  return rows_op(rows, args.width, [=](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

std::unique_ptr<Op> pointwise_op(RowKernel kernel, const PointwiseArgs& args, int64_t rows) {
  return rows_op(rows, args.width, [=](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

std::unique_ptr<Op> gather_op(const float* x, int64_t x_stride, const int32_t* rows, float* out, int64_t out_stride,
                              int64_t count, int64_t width) {
  return rows_op(count, width, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      std::memcpy(out + r * out_stride, x + rows[r] * x_stride, static_cast<size_t>(width) * sizeof(float));
  });
}

std::unique_ptr<Op> embedding_op(const KernelTable& table, const PackedWeight& weight, const int32_t* ids, float scale,
                                 bool accumulate, float* out, int64_t out_stride, int64_t count) {
  const auto embed = table.embed;
  const PackedWeight* w = &weight;
  return rows_op(count, weight.k, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (const WeightPart& part : w->parts) {
        const int64_t row = ids[r] - part.n_offset;
        if (row >= 0 && row < part.n) embed(part, row, scale, accumulate, out + r * out_stride);
      }
    }
  });
}

std::unique_ptr<Op> rope_op(const KernelTable& table, const RopeArgs& args, int64_t tokens) {
  const auto kernel = table.rope_and_store;
  const int64_t width = (args.q_heads + 2 * args.kv.kv_heads) * args.kv.d;
  return rows_op(tokens, width, [=](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

std::unique_ptr<Op> copy_blocks_op(uint8_t* cache, int64_t block_bytes, const int32_t* sources, const int32_t* targets,
                                   int64_t count) {
  return std::make_unique<CopyBlocksOp>(cache, block_bytes, std::vector<int32_t>(sources, sources + count),
                                        std::vector<int32_t>(targets, targets + count));
}

std::unique_ptr<Op> route_experts_op(Matrix logits, int64_t experts, int64_t top_k, bool normalize, int32_t* ids,
                                     float* weights) {
  return rows_op(logits.rows, experts * top_k, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      route_row(logits.data + r * logits.stride, experts, top_k, normalize, ids + r * top_k, weights + r * top_k);
  });
}

std::unique_ptr<Op> combine_experts_op(const float* y, const float* weights, int64_t top_k, int64_t width, Matrix out) {
  return rows_op(out.rows, width * top_k, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* target = out.data + r * out.stride;
      for (int64_t i = 0; i < width; ++i) {
        float sum = weights[r * top_k] * y[r * top_k * width + i];
        for (int64_t j = 1; j < top_k; ++j) sum += weights[r * top_k + j] * y[(r * top_k + j) * width + i];
        target[i] = sum;
      }
    }
  });
}

}  // namespace octavo
