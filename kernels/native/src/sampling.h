// From logits to tokens. The order of operations is KernelSet.sample's contract.
#pragma once

#include <memory>

#include "session.h"

namespace octavo {

// Sparse rows: entries of row r are starts[r] … starts[r + 1] − 1. starts == nullptr: nothing.
struct SparseRows {
  const int32_t* starts = nullptr;
  const int32_t* ids = nullptr;
  const float* values = nullptr;   // bias
  const int32_t* counts = nullptr; // penalties: occurrences among the outputs
};

// Bit masks: row r may draw the tokens whose bits are set in bits[rows[r]]; rows[r] < 0: it is free. bits == nullptr: all are.
struct MaskRows {
  const int32_t* rows = nullptr;
  const uint32_t* bits = nullptr;
  int64_t words = 0;  // a mask's
};

struct SamplingArgs {
  const float* logits;
  int64_t rows, vocab, stride;
  const float *temperature, *top_p, *min_p;
  const int32_t *top_k, *choice_index, *output_position;
  const uint64_t* seed;
  MaskRows mask;
  SparseRows allowed, banned, bias, penalties;
  const float *repetition, *presence, *frequency;  // with penalties
  int32_t* tokens;                                 // result
};

struct LogprobsArgs {
  const float* logits;
  int64_t rows, vocab, stride, top;
  const int32_t* token_ids;
  float* logprob;  // results
  int32_t* rank;
  int32_t* top_ids;
  float* top_logprobs;
};

std::unique_ptr<Op> sample_op(const KernelTable& table, const SamplingArgs& args);
std::unique_ptr<Op> logprobs_op(const KernelTable& table, const LogprobsArgs& args);

}  // namespace octavo
