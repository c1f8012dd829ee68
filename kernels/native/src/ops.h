// Operations of the model, ready to run. Sizes are checked by whoever builds them.
#pragma once

#include <memory>

#include "prepared.h"
#include "session.h"

namespace octavo {

using RowKernel = void (*)(const PointwiseArgs&, int64_t, int64_t);

std::unique_ptr<Op> norm_op(const KernelTable& table, const NormArgs& args, int64_t rows, bool layer_norm);
std::unique_ptr<Op> pointwise_op(RowKernel kernel, const PointwiseArgs& args, int64_t rows);
std::unique_ptr<Op> gather_op(const float* x, int64_t x_stride, const int32_t* rows, float* out, int64_t out_stride,
                              int64_t count, int64_t width);
std::unique_ptr<Op> embedding_op(const KernelTable& table, const PackedWeight& weight, const int32_t* ids, float scale,
                                 bool accumulate, float* out, int64_t out_stride, int64_t count);
std::unique_ptr<Op> rope_op(const KernelTable& table, const RopeArgs& args, int64_t tokens);
std::unique_ptr<Op> copy_blocks_op(uint8_t* cache, int64_t block_bytes, const int32_t* sources, const int32_t* targets,
                                   int64_t count);

std::unique_ptr<Op> linear_op(const KernelTable& table, const PackedWeight& weight, Matrix x, Matrix out);

// out = down(act(gate) · up) with gate beside up the product of x and `up`; `activated` is work space. The weight must fit.
bool gated_mlp_fits(const PackedWeight& up);
std::unique_ptr<Op> gated_mlp_op(const KernelTable& table, const PackedWeight& up, Activation activation,
                                 const PackedWeight& down, Matrix x, Matrix activated, Matrix out);

// Expert e is experts[e]. Row t·k + j of `out` is choice j of token t; x has a row per token (shared) or per choice.
struct ExpertRows {
  const int32_t* ids;  // [tokens · top_k]
  int64_t tokens, top_k;
  bool shared_input;
};
std::unique_ptr<Op> grouped_linear_op(const KernelTable& table, std::vector<const PackedWeight*> experts,
                                      const ExpertRows& rows, Matrix x, Matrix out);
std::unique_ptr<Op> route_experts_op(Matrix logits, int64_t experts, int64_t top_k, bool normalize, int32_t* ids,
                                     float* weights);
std::unique_ptr<Op> combine_experts_op(const float* y, const float* weights, int64_t top_k, int64_t width, Matrix out);

struct AttentionBatch {
  const int32_t* query_start_loc;  // [seqs + 1]
  const int32_t* seq_lens;         // [seqs]
  int64_t seqs;
  int64_t tokens;  // rows of q
};

// The tiles of the step at hand; shared by all attention operations of a session, which run one after another.
struct AttentionWork {
  struct Merge {
    const float* first;  // of the row's partials
    int64_t parts, stride;
    int64_t token, head;
  };
  std::vector<AttentionTile> tiles;
  int64_t together = 1;  // so many in a row go to one thread
  std::vector<Merge> merges;
  Scratch partials;
};
std::unique_ptr<Op> attention_op(const KernelTable& table, AttentionWork& work, const AttentionArgs& args,
                                 const AttentionBatch& batch);

}  // namespace octavo
