// Products with experts: tokens are sorted by expert, and an expert's rows multiplied together.
#include <algorithm>
#include <cstring>

#include "ops.h"
#include "prepared.h"

namespace octavo {
namespace {

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

  void run(Team& team) override {
    if (count_ == 0) return;
    sort_by_expert();
    // Rows in the order of experts: gathered once, and prepared from there.
    auto* gathered = reinterpret_cast<float*>(team.shared() + prepared_.bytes());
    const int64_t k = experts_[0]->k;
    const Matrix sorted{gathered, padded_, k};
    for_chunks(team, ends_.back(), kPrepareRows, [&](Worker&, int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        float* row = gathered + r * k;
        const int64_t source = sources_[static_cast<size_t>(r)];
        if (source < 0)
          std::memset(row, 0, static_cast<size_t>(k) * sizeof(float));
        else
          std::memcpy(row, x_.data + source * x_.stride, static_cast<size_t>(k) * sizeof(float));
      }
      prepared_.fill(sorted, team.shared(), begin, end);
    });
    const int64_t blocks = blocks_of(*experts_[0]);
    team.parallel(static_cast<int64_t>(experts_.size()) * blocks, [&](Worker& worker, int64_t item) {
      multiply(worker, team.shared(), sorted, static_cast<size_t>(item / blocks), item % blocks);
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
  void multiply(Worker& worker, uint8_t* input, Matrix sorted, size_t expert, int64_t block) {
    const PackedWeight& weight = *experts_[expert];
    for (const WeightPart& part : weight.parts) {
      const int64_t blocks = blocks_of(part);
      if (block < blocks) {
        LinearArgs args = prepared_.args(weight, part, sorted, out_, input);
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

std::unique_ptr<Op> grouped_linear_op(const KernelTable& table, std::vector<const PackedWeight*> experts,
                                      const ExpertRows& rows, Matrix x, Matrix out) {
  return std::make_unique<GroupedLinearOp>(table, std::move(experts), rows, x, out);
}

}  // namespace octavo
