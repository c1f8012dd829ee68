// Attention: the step's queries are cut into tiles, and few tiles with long contexts further into partitions.
#include <algorithm>

#include "ops.h"

namespace octavo {
namespace {

constexpr int64_t kTileRows = 64;        // (token, head) rows that share one walk over the keys
constexpr int64_t kTilesPerThread = 4;   // with fewer tiles than this, split them along the keys

class AttentionOp final : public Op {
 public:
  AttentionOp(const KernelTable& table, AttentionWork& work, const AttentionArgs& args, const AttentionBatch& batch)
      : table_(table), work_(work), args_(args), batch_(batch),
        tile_tokens_(static_cast<int32_t>(std::max<int64_t>(1, kTileRows / args.group))) {}

  size_t local_bytes() const override { return static_cast<size_t>(table_.attention_scratch(args_.kv)); }

  void run(Team& team) override {
    plan(team.size());
    for_chunks(team, static_cast<int64_t>(work_.tiles.size()), work_.together, [&](Worker& worker, int64_t i, int64_t end) {
      for (; i < end; ++i) table_.attend(args_, work_.tiles[static_cast<size_t>(i)], worker.local);
    });
    team.parallel(static_cast<int64_t>(work_.merges.size()), [&](Worker&, int64_t i) {
      const AttentionWork::Merge& m = work_.merges[static_cast<size_t>(i)];
      float* out = args_.out + m.token * args_.out_token + m.head * args_.out_head;
      table_.merge_partials(m.first, m.parts, m.stride, args_.kv.dv, args_.kv.dv_padded, out);
    });
  }

 private:
  // Keys of one partition: whole blocks.
  int32_t partition_keys() const { return kSplitKeys / args_.kv.lanes * args_.kv.block_size; }
  int64_t row_floats() const { return args_.kv.dv_padded + 2; }

  void plan(int threads) {
    work_.tiles.clear();
    work_.merges.clear();
    for (int64_t s = 0; s < batch_.seqs; ++s) add_sequence(s);
    // Heads of a block lie side by side: one thread takes them all where there is enough for everybody.
    const auto enough = static_cast<size_t>(threads * kTilesPerThread * args_.kv.kv_heads);
    work_.together = work_.tiles.size() >= enough ? args_.kv.kv_heads : 1;
    if (work_.tiles.size() < static_cast<size_t>(threads * kTilesPerThread)) split_tiles();
  }

  void add_sequence(int64_t s) {
    const int32_t first = batch_.query_start_loc[s], queries = batch_.query_start_loc[s + 1] - first;
    const int32_t start = batch_.seq_lens[s] - queries;  // position of the first query
    for (int32_t t = 0; t < queries; t += tile_tokens_)
      for (int32_t h = 0; h < args_.kv.kv_heads; ++h) {
        AttentionTile tile{};
        tile.table = args_.tables + s * args_.table_stride;
        tile.first_token = first + t;
        tile.first_position = start + t;
        tile.num_tokens = std::min(tile_tokens_, queries - t);
        tile.kv_head = h;
        tile.last_key = tile.first_position + tile.num_tokens;
        const int32_t visible = args_.window ? std::max(0, tile.first_position + 1 - args_.window) : 0;
        tile.first_key = visible / partition_keys() * partition_keys();
        work_.tiles.push_back(tile);
      }
  }

  // Every tile of several partitions becomes one tile per partition, whose results are merged in order afterwards.
  void split_tiles() {
    const int32_t keys = partition_keys();
    const auto parts_of = [&](const AttentionTile& t) { return (t.last_key - t.first_key + keys - 1) / keys; };
    int64_t floats = 0;
    for (const AttentionTile& t : work_.tiles)
      if (parts_of(t) > 1) floats += parts_of(t) * t.num_tokens * args_.group * row_floats();
    if (floats == 0) return;
    auto* partial = reinterpret_cast<float*>(work_.partials.reserve(static_cast<size_t>(floats) * sizeof(float)));
    std::vector<AttentionTile> whole;
    whole.swap(work_.tiles);
    for (const AttentionTile& t : whole) {
      const int64_t rows = static_cast<int64_t>(t.num_tokens) * args_.group, parts = parts_of(t);
      if (parts == 1) {
        work_.tiles.push_back(t);
        continue;
      }
      for (int64_t row = 0; row < rows; ++row)
        work_.merges.push_back({partial + row * row_floats(), parts, rows * row_floats(),
                                t.first_token + row / args_.group, t.kv_head * args_.group + row % args_.group});
      for (int64_t p = 0; p < parts; ++p, partial += rows * row_floats()) {
        AttentionTile piece = t;
        piece.first_key = t.first_key + static_cast<int32_t>(p) * keys;
        piece.last_key = std::min(t.last_key, piece.first_key + keys);
        piece.partial = partial;
        work_.tiles.push_back(piece);
      }
    }
  }

  const KernelTable& table_;
  AttentionWork& work_;
  AttentionArgs args_;
  AttentionBatch batch_;
  int32_t tile_tokens_;
};

}  // namespace

std::unique_ptr<Op> attention_op(const KernelTable& table, AttentionWork& work, const AttentionArgs& args,
                                 const AttentionBatch& batch) {
  return std::make_unique<AttentionOp>(table, work, args, batch);
}

}  // namespace octavo
