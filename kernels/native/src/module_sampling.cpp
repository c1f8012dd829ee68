// Sampling and logprobs as methods of a session.
#include <nanobind/stl/tuple.h>

#include "arrays.h"
#include "sampling.h"

namespace octavo {
namespace {

using Sparse = std::optional<nb::tuple>;  // (row_starts, token_ids[, values or counts])

void check_rows(const int32_t* starts, const int32_t* ids, int64_t rows, int64_t nnz, int64_t vocab) {
  expect(starts[0] == 0 && starts[rows] <= nnz, "row_starts", "do not fit the entries");
  for (int64_t r = 0; r < rows; ++r) expect(starts[r] <= starts[r + 1], "row_starts", "not ascending");
  for (int64_t i = 0; i < starts[rows]; ++i) expect(ids[i] >= 0 && ids[i] < vocab, "token_ids", "not in the vocabulary");
}

// Views of the tuple's arrays, which the caller keeps alive.
SparseRows sparse(const Sparse& tuple, int64_t rows, int64_t vocab, bool floats) {
  SparseRows s;
  if (!tuple) return s;
  const auto starts = dense<const int32_t>(nb::cast<In>((*tuple)[0]), "row_starts", 1);
  const auto ids = dense<const int32_t>(nb::cast<In>((*tuple)[1]), "token_ids", 1);
  expect(starts.rows() == rows + 1, "row_starts", "wrong length");
  check_rows(starts.data, ids.data, rows, ids.rows(), vocab);
  s.starts = starts.data;
  s.ids = ids.data;
  if (nb::len(*tuple) == 2) return s;
  const auto third = nb::cast<In>((*tuple)[2]);
  expect(static_cast<int64_t>(third.shape(0)) == ids.rows(), "values", "wrong length");
  if (floats)
    s.values = dense<const float>(third, "values", 1).data;
  else
    s.counts = dense<const int32_t>(third, "output_counts", 1).data;
  return s;
}

// Views of the tuple (rows, bits), which the caller keeps alive.
MaskRows mask_rows(const Sparse& tuple, int64_t rows, int64_t vocab) {
  MaskRows m;
  if (!tuple) return m;
  const auto index = dense<const int32_t>(nb::cast<In>((*tuple)[0]), "mask rows", 1);
  const auto bits = dense<const uint32_t>(nb::cast<In>((*tuple)[1]), "mask bits", 2);
  expect(index.rows() == rows, "mask rows", "one entry per row, please");
  expect(bits.last() == (vocab + 31) / 32, "mask bits", "do not fit the vocabulary");
  for (int64_t r = 0; r < rows; ++r) expect(index.data[r] < bits.rows(), "mask rows", "there is no such mask");
  m.rows = index.data;
  m.bits = bits.data;
  m.words = bits.last();
  return m;
}

template <typename T, typename Array> const T* per_row(const Array& array, const char* name, int64_t rows) {
  const auto v = dense<const T>(array, name, 1);
  expect(v.rows() == rows, name, "one entry per row, please");
  return v.data;
}

// `floats`: temperature, top_p, min_p; `ints`: top_k, choice_index, output_position; all [R].
void sample(Session& s, const In& logits, const nb::tuple& floats, const nb::tuple& ints, const In& seed,
            const Sparse& allowed, const Sparse& banned, const Sparse& bias, const Sparse& penalties,
            const Sparse& factors, const Out& tokens, const Sparse& mask) {
  const auto vl = view<const float>(logits, "logits", 2);
  const int64_t rows = vl.rows(), vocab = vl.last();
  SamplingArgs a{};
  a.logits = vl.data;
  a.rows = rows;
  a.vocab = vocab;
  a.stride = vl.stride[0];
  a.temperature = per_row<float>(nb::cast<In>(floats[0]), "temperature", rows);
  a.top_p = per_row<float>(nb::cast<In>(floats[1]), "top_p", rows);
  a.min_p = per_row<float>(nb::cast<In>(floats[2]), "min_p", rows);
  a.top_k = per_row<int32_t>(nb::cast<In>(ints[0]), "top_k", rows);
  a.choice_index = per_row<int32_t>(nb::cast<In>(ints[1]), "choice_index", rows);
  a.output_position = per_row<int32_t>(nb::cast<In>(ints[2]), "output_position", rows);
  a.seed = per_row<uint64_t>(seed, "seed", rows);
  a.mask = mask_rows(mask, rows, vocab);
  a.allowed = sparse(allowed, rows, vocab, false);
  a.banned = sparse(banned, rows, vocab, false);
  a.bias = sparse(bias, rows, vocab, true);
  a.penalties = sparse(penalties, rows, vocab, false);
  if (a.penalties.starts) {
    expect(factors.has_value(), "penalties", "factors are missing");
    a.repetition = per_row<float>(nb::cast<In>((*factors)[0]), "repetition", rows);
    a.presence = per_row<float>(nb::cast<In>((*factors)[1]), "presence", rows);
    a.frequency = per_row<float>(nb::cast<In>((*factors)[2]), "frequency", rows);
  }
  a.tokens = const_cast<int32_t*>(per_row<int32_t>(tokens, "tokens", rows));
  submit(s, sample_op(s.table, a));
}

void logprobs(Session& s, const In& logits, const In& token_ids, const Out& logprob, const Out& rank,
              const Out& top_ids, const Out& top_logprobs) {
  const auto vl = view<const float>(logits, "logits", 2);
  const auto vt = dense<int32_t>(top_ids, "top_token_ids", 2);
  LogprobsArgs a{};
  a.logits = vl.data;
  a.rows = vl.rows();
  a.vocab = vl.last();
  a.stride = vl.stride[0];
  a.top = vt.last();
  expect(vt.rows() == a.rows && a.top <= a.vocab, "top_token_ids", "wrong shape");
  a.token_ids = per_row<int32_t>(token_ids, "token_ids", a.rows);
  for (int64_t r = 0; r < a.rows; ++r)
    expect(a.token_ids[r] >= 0 && a.token_ids[r] < a.vocab, "token_ids", "not in the vocabulary");
  a.logprob = const_cast<float*>(per_row<float>(logprob, "logprob", a.rows));
  a.rank = const_cast<int32_t*>(per_row<int32_t>(rank, "rank", a.rows));
  a.top_ids = vt.data;
  const auto vf = dense<float>(top_logprobs, "top_logprobs", 2);
  expect(vf.shape == vt.shape, "top_logprobs", "wrong shape");
  a.top_logprobs = vf.data;
  submit(s, logprobs_op(s.table, a));
}

nb::list philox(Session& s, uint64_t seed, uint32_t token, uint32_t position, uint32_t choice) {
  uint32_t words[kLanes];
  s.table.philox(seed, token, position, choice, words);
  nb::list result;
  for (const uint32_t word : words) result.append(word);
  return result;
}

}  // namespace

void bind_sampling(nb::class_<Session>& session) {
  session
      .def("sample", &sample, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(),
           nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg().none() = nb::none())
      .def("logprobs", &logprobs)
      .def("philox", &philox);
}

}  // namespace octavo
