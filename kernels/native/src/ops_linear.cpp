// Products: the activations are brought into the weights' form once, then blocks of outputs are shared out.
#include <algorithm>
#include <cstring>

#include "ops.h"
#include "prepared.h"

namespace octavo {
namespace {

constexpr int64_t kRowChunk = 256;          // rows of activations that stay in a core's cache
constexpr int64_t kPrivateElements = 8192;  // so few are prepared by every thread for itself: no barrier

// A product's work items: some blocks of one part for some rows.
class Items {
 public:
  Items(const PackedWeight& weight, int64_t rows, int threads)
      : weight_(weight), rows_(rows), row_chunks_((rows + kRowChunk - 1) / kRowChunk),
        step_(std::clamp<int64_t>(blocks_of(weight) * row_chunks_ / (threads * 8), 1, 8)) {}

  int64_t count() const {
    int64_t items = 0;
    for (const WeightPart& part : weight_.parts) items += chunks(part) * row_chunks_;
    return items;
  }
  void run(int64_t item, const KernelTable& table, const Prepared& prepared, Matrix x, Matrix out, uint8_t* input,
           uint8_t* scratch) const {
    for (const WeightPart& part : weight_.parts) {
      const int64_t items = chunks(part) * row_chunks_;
      if (item >= items) {
        item -= items;
        continue;
      }
      LinearArgs args = prepared.args(weight_, part, x, out, input);
      args.scratch = scratch;
      const int64_t row = item / chunks(part) * kRowChunk, block = item % chunks(part) * step_;
      table.linear(args, row, std::min(row + kRowChunk, rows_), block, std::min(block + step_, blocks_of(part)));
      return;
    }
  }

 private:
  int64_t chunks(const WeightPart& part) const { return (blocks_of(part) + step_ - 1) / step_; }

  const PackedWeight& weight_;
  int64_t rows_, row_chunks_, step_;
};

// Where a product's activations are prepared: few by every thread for itself, when it takes its first item; many by all
// together beforehand.
class Input {
 public:
  Input(const KernelTable& table, const PackedWeight& weight, Matrix x)
      : prepared(table, weight, x.rows), x_(x), private_(prepared.elements() <= kPrivateElements) {}

  size_t local_bytes() const { return private_ ? prepared.bytes() : 0; }
  size_t shared_bytes() const { return private_ ? 0 : prepared.bytes(); }

  void fill_shared(Team& team, uint8_t* shared) const {
    if (private_ || !prepared.needed()) return;
    for_chunks(team, x_.rows, kPrepareRows,
               [&](Worker&, int64_t begin, int64_t end) { prepared.fill(x_, shared, begin, end); });
  }
  uint8_t* at(Worker& worker, uint8_t* local, uint8_t* shared) const {
    if (!private_) return shared;
    if (worker.fresh()) prepared.fill(x_, local, 0, x_.rows);
    return local;
  }

  const Prepared prepared;

 private:
  Matrix x_;
  bool private_;
};

class LinearOp final : public Op {
 public:
  LinearOp(const KernelTable& table, const PackedWeight& weight, Matrix x, Matrix out)
      : table_(table), weight_(weight), x_(x), out_(out), input_(table, weight, x) {}

  size_t local_bytes() const override { return kernel_bytes() + input_.local_bytes(); }
  size_t shared_bytes() const override { return input_.shared_bytes(); }

  void run(Team& team) override {
    if (x_.rows == 0) return;
    input_.fill_shared(team, team.shared());
    const Items items(weight_, x_.rows, team.size());
    team.parallel(items.count(), [&](Worker& worker, int64_t item) {
      uint8_t* input = input_.at(worker, worker.local + kernel_bytes(), team.shared());
      items.run(item, table_, input_.prepared, x_, out_, input, worker.local);
    });
  }

 private:
  size_t kernel_bytes() const { return static_cast<size_t>(table_.linear_scratch(weight_.k)); }

  const KernelTable& table_;
  const PackedWeight& weight_;
  Matrix x_, out_;
  Input input_;
};

// down(act(gate(x)) · up(x)): what lies between the products is made a few columns at a time, in a core's cache, and goes
// straight into the form that `down` reads.
class GatedMlpOp final : public Op {
 public:
  GatedMlpOp(const KernelTable& table, const PackedWeight& up, Activation activation, const PackedWeight& down, Matrix x,
             Matrix activated, Matrix out)
      : table_(table), up_(up), down_(down), activation_(activation), x_(x), activated_(activated), out_(out),
        up_input_(table, up, x), down_input_(table, down, x.rows), columns_(x.rows <= kLanes ? 64 : 128) {}

  // Gate and up must be cut at whole blocks, in equal formats' order.
  static bool fits(const PackedWeight& up) {
    if (up.parts.size() == 1) return up.n % (2 * kGroup) == 0;
    return up.parts.size() == 2 && up.parts[0].n == up.parts[1].n;
  }

  size_t local_bytes() const override { return kernel_bytes() + strip_bytes() + up_input_.local_bytes(); }
  size_t shared_bytes() const override { return up_bytes() + down_input_.bytes(); }

  void run(Team& team) override {
    if (x_.rows == 0) return;
    up_input_.fill_shared(team, team.shared());
    uint8_t* between = team.shared() + up_bytes();
    const int64_t width = up_.n / 2, strips = (width + columns_ - 1) / columns_;
    team.parallel(strips * ((x_.rows + kRowChunk - 1) / kRowChunk), [&](Worker& worker, int64_t item) {
      uint8_t* input = up_input_.at(worker, worker.local + kernel_bytes() + strip_bytes(), team.shared());
      const int64_t row = item / strips * kRowChunk;
      make_strip(worker, input, between, row, std::min(row + kRowChunk, x_.rows), item % strips * columns_);
    });
    const Items items(down_, x_.rows, team.size());
    team.parallel(items.count(), [&](Worker& worker, int64_t item) {
      items.run(item, table_, down_input_, activated_, out_, between, worker.local);
    });
  }

 private:
  size_t kernel_bytes() const {
    return static_cast<size_t>(std::max(table_.linear_scratch(up_.k), table_.linear_scratch(down_.k)));
  }
  // Rows of `columns_` gates, as many ups, and a line that keeps rows out of each other's cache sets.
  int64_t strip_stride() const { return 2 * columns_ + kLanes; }
  size_t strip_bytes() const {
    return static_cast<size_t>(round_up(std::min(x_.rows, kRowChunk), kLanes) * strip_stride()) * sizeof(float);
  }
  size_t up_bytes() const { return (up_input_.shared_bytes() + 63) / 64 * 64; }

  void make_strip(Worker& worker, uint8_t* input, uint8_t* between, int64_t row, int64_t row_end, int64_t column) const {
    auto* strip = reinterpret_cast<float*>(worker.local + kernel_bytes());
    const int64_t width = up_.n / 2, count = std::min(columns_, width - column);
    for (int64_t half = 0; half < 2; ++half) {
      const WeightPart& part = up_.parts[up_.parts.size() == 1 ? 0 : static_cast<size_t>(half)];
      const int64_t in_part = half * width + column - part.n_offset;
      LinearArgs args = up_input_.prepared.args(up_, part, x_, {strip + half * columns_, x_.rows, strip_stride()}, input);
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
      down_input_.fill(strip, strip_stride(), {column, count}, between, row, row_end);
  }

  const KernelTable& table_;
  const PackedWeight &up_, &down_;
  Activation activation_;
  Matrix x_, activated_, out_;
  Input up_input_;
  Prepared down_input_;
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
