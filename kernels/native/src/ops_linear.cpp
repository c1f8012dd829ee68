// Products: the activations are brought into the weights' form once, then blocks of outputs are shared out.
#include <algorithm>
#include <cstring>

#include "ops.h"

namespace octavo {
namespace {

constexpr int64_t kRowChunk = 256;         // rows of activations that stay in a core's cache
constexpr int64_t kPrivateElements = 8192; // so few are prepared by every thread for itself: no barrier
constexpr int64_t kPrepareRows = 8;

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Activations in the forms that a weight's parts read, laid out in one piece of scratch.
class Prepared {
 public:
  Prepared(const KernelTable& table, const PackedWeight& weight, int64_t rows)
      : table_(table), rows_(round_up(std::max<int64_t>(rows, 1), kLanes)), k_(weight.k),
        k_padded_(round_up(weight.k, kGroup)), quantized_(!table.tiles && weight.quantized()), bf16_(table.tiles && !weight.wide()),
        scale_(weight.activation_scale()) {}

  size_t bytes() const {
    const int64_t groups = k_padded_ / kGroup;
    return static_cast<size_t>(quantized_ ? rows_ * (k_padded_ + 12 * groups) : bf16_ ? rows_ * k_padded_ * 2 : 0);
  }
  bool needed() const { return quantized_ || bf16_; }
  int64_t elements() const { return rows_ * k_padded_; }

  QuantizedRows quantized(uint8_t* scratch) const {
    const int64_t groups = k_padded_ / kGroup;
    QuantizedRows q{};
    q.k = k_;
    q.k_padded = k_padded_;
    q.codes = reinterpret_cast<int8_t*>(scratch);
    q.scale = reinterpret_cast<float*>(scratch + rows_ * k_padded_);
    q.sum = q.scale + rows_ * groups;
    q.isum = reinterpret_cast<int32_t*>(q.sum + rows_ * groups);
    return q;
  }
  uint16_t* bf16(uint8_t* scratch) const {
    return reinterpret_cast<uint16_t*>(scratch);
  }
  void prepare(Matrix x, uint8_t* scratch, int64_t begin, int64_t end) const {
    if (quantized_) table_.quantize(x.data, x.stride, quantized(scratch), begin, end);
    if (bf16_) table_.to_bf16(x.data, x.stride, k_, scale_, bf16(scratch), begin, end);
    if (end == x.rows) clear_padding(scratch, end);
  }
  LinearArgs args(const PackedWeight& weight, const WeightPart& part, Matrix x, Matrix out, uint8_t* scratch) const {
    LinearArgs a{};
    a.part = part;
    if (quantized_) a.q = quantized(scratch);
    if (bf16_) a.x_bf16 = bf16(scratch);
    a.x = x.data;
    a.x_scale = scale_;
    a.x_stride = x.stride;
    a.out = out.data;
    a.out_stride = out.stride;
    a.bias = weight.bias.empty() ? nullptr : weight.bias.data();
    return a;
  }

 private:
  // Tiles are read whole. A padding row changes no other row, but should be something.
  void clear_padding(uint8_t* scratch, int64_t row) const {
    for (; bf16_ && row < rows_; ++row)
      for (int64_t s = 0, at = row / 16 * 16 * k_padded_ + row % 16 * 32; s < k_padded_ / 32; ++s, at += 512)
        std::memset(bf16(scratch) + at, 0, 64);
  }

  const KernelTable& table_;
  int64_t rows_, k_, k_padded_;
  bool quantized_, bf16_;
  float scale_;
};

int64_t blocks_of(const WeightPart& part) { return round_up(part.n, kLanes) / kLanes; }

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
    const auto kernel_scratch = table_.linear_scratch(weight_.k);
    uint8_t* scratch = private_ ? worker.local + kernel_scratch : worker.shared;
    if (private_) {
      prepared_.prepare(x_, scratch, 0, x_.rows);
    } else if (prepared_.needed()) {
      for_chunks(worker, x_.rows, kPrepareRows,
                 [&](int64_t begin, int64_t end) { prepared_.prepare(x_, scratch, begin, end); });
      worker.barrier();
    }
    multiply(worker, scratch);
  }

 private:
  void multiply(Worker& worker, uint8_t* scratch) {
    int64_t blocks = 0;
    for (const WeightPart& part : weight_.parts) blocks += blocks_of(part);
    const int64_t row_chunks = (x_.rows + kRowChunk - 1) / kRowChunk;
    const int64_t step = std::clamp<int64_t>(blocks * row_chunks / (worker.count * 8), 1, 8);
    int64_t first = 0;  // work items before this part
    int64_t item = worker.next();
    for (const WeightPart& part : weight_.parts) {
      const int64_t part_blocks = blocks_of(part), chunks = (part_blocks + step - 1) / step;
      LinearArgs args = prepared_.args(weight_, part, x_, out_, scratch);
      args.scratch = worker.local;
      for (; item < first + chunks * row_chunks; item = worker.next()) {
        const int64_t row = (item - first) / chunks * kRowChunk, block = (item - first) % chunks * step;
        table_.linear(args, row, std::min(row + kRowChunk, x_.rows), block, std::min(block + step, part_blocks));
      }
      first += chunks * row_chunks;
    }
  }

  const KernelTable& table_;
  const PackedWeight& weight_;
  Matrix x_, out_;
  Prepared prepared_;
  bool private_;
};

class GroupedLinearOp final : public Op {
 public:
  GroupedLinearOp(const KernelTable& table, std::vector<const PackedWeight*> experts, const ExpertRows& rows, Matrix x,
                  Matrix out)
      : table_(table), experts_(std::move(experts)), rows_(rows), x_(x), out_(out), count_(rows.tokens * rows.top_k),
        padded_(count_ + kLanes * static_cast<int64_t>(experts_.size())), prepared_(table, *experts_[0], padded_),
        order_(static_cast<size_t>(padded_)), sources_(static_cast<size_t>(padded_)), starts_(experts_.size()),
        ends_(experts_.size()) {}

  size_t local_bytes() const override { return static_cast<size_t>(table_.linear_scratch(experts_[0]->k)); }
  size_t shared_bytes() const override {
    return prepared_.bytes() + static_cast<size_t>(padded_ * experts_[0]->k) * sizeof(float);
  }

  void run(Worker& worker) override {
    if (count_ == 0) return;
    if (worker.id == 0) sort_by_expert();
    worker.barrier();
    // Rows in the order of experts: gathered once, and prepared from there.
    auto* gathered = reinterpret_cast<float*>(worker.shared + prepared_.bytes());
    const int64_t k = experts_[0]->k;
    const Matrix sorted{gathered, padded_, k};
    for_chunks(worker, ends_.back(), kPrepareRows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        float* row = gathered + r * k;
        const int64_t source = sources_[static_cast<size_t>(r)];
        if (source < 0)
          std::memset(row, 0, static_cast<size_t>(k) * sizeof(float));
        else
          std::memcpy(row, x_.data + source * x_.stride, static_cast<size_t>(k) * sizeof(float));
      }
      prepared_.prepare(sorted, worker.shared, begin, end);
    });
    worker.barrier();
    int64_t blocks = 0;
    for (const WeightPart& part : experts_[0]->parts) blocks += blocks_of(part);
    for_chunks(worker, static_cast<int64_t>(experts_.size()) * blocks, 1, [&](int64_t item, int64_t) {
      multiply(worker, sorted, static_cast<size_t>(item / blocks), item % blocks);
    });
  }

 private:
  // Expert e has the sorted rows starts_[e] … ends_[e] − 1; each begins a tile of 16.
  void sort_by_expert() {
    std::vector<int64_t> counts(experts_.size());
    for (int64_t i = 0; i < count_; ++i) ++counts[static_cast<size_t>(rows_.ids[i])];
    int64_t at = 0;
    for (size_t e = 0; e < counts.size(); ++e) {
      starts_[e] = ends_[e] = at;
      at = round_up(at + counts[e], kLanes);
    }
    std::fill(sources_.begin(), sources_.end(), -1);
    for (int64_t i = 0; i < count_; ++i) {
      const auto position = static_cast<size_t>(ends_[static_cast<size_t>(rows_.ids[i])]++);
      order_[position] = static_cast<int32_t>(i);
      sources_[position] = static_cast<int32_t>(rows_.shared_input ? i / rows_.top_k : i);
    }
  }

  // Item `block` counts blocks of 16 outputs over the expert's parts.
  void multiply(Worker& worker, Matrix sorted, size_t expert, int64_t block) {
    const PackedWeight& weight = *experts_[expert];
    for (const WeightPart& part : weight.parts) {
      const int64_t blocks = blocks_of(part);
      if (block < blocks) {
        LinearArgs args = prepared_.args(weight, part, sorted, out_, worker.shared);
        args.out_rows = order_.data();
        args.scratch = worker.local;
        table_.linear(args, starts_[expert], ends_[expert], block, block + 1);
        return;
      }
      block -= blocks;
    }
  }

  const KernelTable& table_;
  std::vector<const PackedWeight*> experts_;
  ExpertRows rows_;
  Matrix x_, out_;
  int64_t count_, padded_;
  Prepared prepared_;
  std::vector<int32_t> order_, sources_;  // by sorted row
  std::vector<int64_t> starts_, ends_;    // by expert
};

}  // namespace

std::unique_ptr<Op> linear_op(const KernelTable& table, const PackedWeight& weight, Matrix x, Matrix out) {
  return std::make_unique<LinearOp>(table, weight, x, out);
}

std::unique_ptr<Op> grouped_linear_op(const KernelTable& table, std::vector<const PackedWeight*> experts,
                                      const ExpertRows& rows, Matrix x, Matrix out) {
  return std::make_unique<GroupedLinearOp>(table, std::move(experts), rows, x, out);
}

}  // namespace octavo
