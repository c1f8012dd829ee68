// Products: the activations are brought into the weights' form once, then blocks of outputs are shared out.
#include <algorithm>
#include <cstring>

#include "ops.h"
#include "prepared.h"

namespace octavo {
namespace {

constexpr int64_t kRowChunk = 256;          // rows of activations that stay in a core's cache
constexpr int64_t kPrivateElements = 8192;  // so few are prepared by every thread for itself: no barrier

// The loop over a weight's blocks and the rows' chunks, whoever comes first.
void multiply(Worker& worker, const KernelTable& table, const PackedWeight& weight, const Prepared& prepared, Matrix x,
              Matrix out, uint8_t* scratch) {
  const int64_t row_chunks = (x.rows + kRowChunk - 1) / kRowChunk;
  const int64_t step = std::clamp<int64_t>(blocks_of(weight) * row_chunks / (worker.count * 8), 1, 8);
  int64_t first = 0;  // work items before this part
  int64_t item = worker.next();
  for (const WeightPart& part : weight.parts) {
    const int64_t blocks = blocks_of(part), chunks = (blocks + step - 1) / step;
    LinearArgs args = prepared.args(weight, part, x, out, scratch);
    args.scratch = worker.local;
    for (; item < first + chunks * row_chunks; item = worker.next()) {
      const int64_t row = (item - first) / chunks * kRowChunk, block = (item - first) % chunks * step;
      table.linear(args, row, std::min(row + kRowChunk, x.rows), block, std::min(block + step, blocks));
    }
    first += chunks * row_chunks;
  }
}

class LinearOp final : public Op {
 public:
  LinearOp(const KernelTable& table, const PackedWeight& weight, Matrix x, Matrix out)
      : table_(table), weight_(weight), x_(x), out_(out), prepared_(table, weight, x.rows),
        private_(prepared_.elements() <= kPrivateElements) {}

  size_t local_bytes() const override {
    return static_cast<size_t>(table_.linear_scratch(weight_.k)) + (private_ ? prepared_.bytes() : 0);
  }
  size_t shared_bytes() const override { return private_ ? 0 : prepared_.bytes(); }

  void run(Worker& worker) override {
    if (x_.rows == 0) return;
    uint8_t* scratch = private_ ? worker.local + table_.linear_scratch(weight_.k) : worker.shared;
    if (private_) {
      prepared_.fill(x_, scratch, 0, x_.rows);
    } else if (prepared_.needed()) {
      for_chunks(worker, x_.rows, kPrepareRows,
                 [&](int64_t begin, int64_t end) { prepared_.fill(x_, scratch, begin, end); });
      worker.barrier();
    }
    multiply(worker, table_, weight_, prepared_, x_, out_, scratch);
  }

 private:
  const KernelTable& table_;
  const PackedWeight& weight_;
  Matrix x_, out_;
  Prepared prepared_;
  bool private_;
};

// down(act(gate(x)) · up(x)): what lies between the products is made a few columns at a time, in a core's cache, and goes
// straight into the form that `down` reads.
class GatedMlpOp final : public Op {
 public:
  GatedMlpOp(const KernelTable& table, const PackedWeight& up, Activation activation, const PackedWeight& down, Matrix x,
             Matrix activated, Matrix out)
      : table_(table), up_(up), down_(down), activation_(activation), x_(x), activated_(activated), out_(out),
        up_input_(table, up, x.rows), down_input_(table, down, x.rows), private_(up_input_.elements() <= kPrivateElements),
        columns_(x.rows <= kLanes ? 64 : 128) {}

  // Gate and up must be cut at whole blocks, in equal formats' order.
  static bool fits(const PackedWeight& up) {
    if (up.parts.size() == 1) return up.n % (2 * kGroup) == 0;
    return up.parts.size() == 2 && up.parts[0].n == up.parts[1].n;
  }

  size_t local_bytes() const override {
    const int64_t kernel = std::max(table_.linear_scratch(up_.k), table_.linear_scratch(down_.k));
    return static_cast<size_t>(kernel) + strip_bytes() + (private_ ? up_input_.bytes() : 0);
  }
  size_t shared_bytes() const override { return up_bytes() + down_input_.bytes(); }

  void run(Worker& worker) override {
    if (x_.rows == 0) return;
    const int64_t kernel = std::max(table_.linear_scratch(up_.k), table_.linear_scratch(down_.k));
    auto* strip = reinterpret_cast<float*>(worker.local + kernel);
    uint8_t* input = private_ ? worker.local + kernel + strip_bytes() : worker.shared;
    if (private_) {
      up_input_.fill(x_, input, 0, x_.rows);
    } else if (up_input_.needed()) {
      for_chunks(worker, x_.rows, kPrepareRows, [&](int64_t begin, int64_t end) { up_input_.fill(x_, input, begin, end); });
      worker.barrier();
    }
    const int64_t width = up_.n / 2, strips = (width + columns_ - 1) / columns_;
    for_chunks(worker, strips * row_chunks(), 1, [&](int64_t item, int64_t) {
      const int64_t row = item / strips * kRowChunk;
      make_strip(worker, input, strip, row, std::min(row + kRowChunk, x_.rows), item % strips * columns_);
    });
    worker.barrier();
    multiply(worker, table_, down_, down_input_, activated_, out_, worker.shared + up_bytes());
  }

 private:
  int64_t row_chunks() const { return (x_.rows + kRowChunk - 1) / kRowChunk; }
  // Rows of `columns_` gates, as many ups, and a line that keeps rows out of each other's cache sets.
  int64_t strip_stride() const { return 2 * columns_ + kLanes; }
  size_t strip_bytes() const {
    return static_cast<size_t>(round_up(std::min(x_.rows, kRowChunk), kLanes) * strip_stride()) * sizeof(float);
  }
  size_t up_bytes() const { return private_ ? 0 : static_cast<size_t>(round_up(static_cast<int64_t>(up_input_.bytes()), 64)); }

  void make_strip(Worker& worker, uint8_t* input, float* strip, int64_t row, int64_t row_end, int64_t column) const {
    const int64_t width = up_.n / 2, count = std::min(columns_, width - column);
    for (int64_t half = 0; half < 2; ++half) {
      const WeightPart& part = up_.parts[up_.parts.size() == 1 ? 0 : static_cast<size_t>(half)];
      const int64_t in_part = half * width + column - part.n_offset;
      LinearArgs args = up_input_.args(up_, part, x_, {strip + half * columns_, x_.rows, strip_stride()}, input);
      args.first_row = row;
      args.first_column = half * width + column;
      args.scratch = worker.local;
      table_.linear(args, row, row_end, in_part / kLanes, (in_part + count + kLanes - 1) / kLanes);
    }
    const bool kept = !down_input_.needed();  // `down` reads floats
    float* target = kept ? activated_.data + row * activated_.stride + column : strip;
    const PointwiseArgs gate{strip, target, strip_stride(), kept ? activated_.stride : strip_stride(), count, 0,
                             activation_, nullptr};
    table_.gated_strip(gate, columns_, 0, row_end - row);
    if (!kept)
      down_input_.fill(strip, strip_stride(), {column, count}, worker.shared + up_bytes(), row, row_end);
  }

  const KernelTable& table_;
  const PackedWeight &up_, &down_;
  Activation activation_;
  Matrix x_, activated_, out_;
  Prepared up_input_, down_input_;
  bool private_;
  int64_t columns_;
};

}  // namespace

std::unique_ptr<Op> linear_op(const KernelTable& table, const PackedWeight& weight, Matrix x, Matrix out) {
  return std::make_unique<LinearOp>(table, weight, x, out);
}

bool gated_mlp_fits(const PackedWeight& up) { return GatedMlpOp::fits(up); }

std::unique_ptr<Op> gated_mlp_op(const KernelTable& table, const PackedWeight& up, Activation activation,
                                 const PackedWeight& down, Matrix x, Matrix activated, Matrix out) {
  return std::make_unique<GatedMlpOp>(table, up, activation, down, x, activated, out);
}

}  // namespace octavo
