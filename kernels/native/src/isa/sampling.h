// Scans over a row of logits.
#pragma once

namespace octavo::OCTAVO_ISA {
namespace {

void mask_row(const uint32_t* bits, const float* x, float* out, int64_t n) {
  const F nothing = set1(-__builtin_inff());
  for (int64_t i = 0; i < n; i += kLanes) {
    const M may = from_bits(bits[i / 32] >> i % 32 & 0xFFFF);
    store_n(out + i, n - i, select(may, load_n(x + i, n - i), nothing));
  }
}

float row_max(const float* x, int64_t n, bool* has_nan) {
  F top = set1(-__builtin_inff());
  uint32_t nan = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = n - i;
    F v = load_n(x + i, left);
    if (left < kLanes) v = select(from_bits((1u << left) - 1), v, set1(-__builtin_inff()));
    nan |= bits(is_nan(v));
    top = max(v, top);
  }
  *has_nan = nan != 0;
  return reduce_max(top);
}

int64_t select_at_least(const float* x, int64_t n, float bound, int32_t* out, int64_t limit) {
  int64_t count = 0;
  const F least = set1(bound);
  for (int64_t i = 0; i < n; i += kLanes) {
    uint32_t hits = bits(at_least(load_n(x + i, n - i), least));
    if (n - i < kLanes) hits &= (1u << (n - i)) - 1;
    for (; hits; hits &= hits - 1, ++count)
      if (count < limit) out[count] = static_cast<int32_t>(i) + __builtin_ctz(hits);
  }
  return count;
}

// e^x in float64, x <= 0, relative error below 4e-16; at least 1e-304, which no sum notices. NaN stays NaN.
inline double exp64(double x) {
  x = x < -700.0 ? -700.0 : x;
  constexpr double kMagic = 6755399441055744.0;  // 1.5 · 2^52: adding it rounds to an integer
  const double shifted = x * 1.4426950408889634 + kMagic;
  const double n = shifted - kMagic;
  double r = __builtin_fma(n, -0.69314718036912382, x);
  r = __builtin_fma(n, -1.9082149292705877e-10, r);
  double p = 1.0 / 6227020800;
  p = __builtin_fma(p, r, 1.0 / 479001600);
  p = __builtin_fma(p, r, 1.0 / 39916800);
  p = __builtin_fma(p, r, 1.0 / 3628800);
  p = __builtin_fma(p, r, 1.0 / 362880);
  p = __builtin_fma(p, r, 1.0 / 40320);
  p = __builtin_fma(p, r, 1.0 / 5040);
  p = __builtin_fma(p, r, 1.0 / 720);
  p = __builtin_fma(p, r, 1.0 / 120);
  p = __builtin_fma(p, r, 1.0 / 24);
  p = __builtin_fma(p, r, 1.0 / 6);
  p = __builtin_fma(p, r, 0.5);
  p = __builtin_fma(p, r, 1.0);
  p = __builtin_fma(p, r, 1.0);
  int64_t bits;
  __builtin_memcpy(&bits, &shifted, 8);
  bits = static_cast<int64_t>(static_cast<uint64_t>(bits) << 52) + (int64_t{1023} << 52);
  double power;
  __builtin_memcpy(&power, &bits, 8);
  return p * power;
}

double sum_exp(const float* x, int64_t n, float shift) {
  double sum[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) sum[j] += exp64(static_cast<double>(x[i + j]) - shift);
  for (int j = 0; i < n; ++i, ++j) sum[j] += exp64(static_cast<double>(x[i]) - shift);
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

// Philox4x32-10 (Salmon et al., SC 2011): the first output words for counters (token, position, choice, purpose 0) of
// sixteen consecutive tokens.
inline I philox_words(uint64_t seed, uint32_t token, uint32_t position, uint32_t choice) {
  const auto word = [](uint32_t x) { return iset1(static_cast<int32_t>(x)); };
  constexpr int32_t kLane[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  I c0 = iload(kLane) + word(token), c1 = word(position), c2 = word(choice), c3 = word(0);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    I high0, low0, high1, low1;
    mul_wide(c0, 0xD2511F53u, high0, low0);
    mul_wide(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ word(k0);
    c1 = low1;
    c2 = high0 ^ c3 ^ word(k1);
    c3 = low0;
  }
  return c0;
}

void philox(uint64_t seed, uint32_t token, uint32_t position, uint32_t choice, uint32_t out[kLanes]) {
  int32_t words[kLanes];
  istore(words, philox_words(seed, token, position, choice));
  __builtin_memcpy(out, words, sizeof words);
}

// The token with the largest x + gumbel noise among those with x >= bound; ties to the lowest id.
//
// Noise g = −log(−log u) is at most −log(1 − u), so a token can only win when 1 − u <= exp(x − best so far): a test that
// leaves a handful of exact logarithms in a whole vocabulary. `likely` is a token to begin with.
int32_t gumbel_argmax(const float* x, int64_t n, float bound, int32_t likely, uint64_t seed, uint32_t position,
                      uint32_t choice) {
  const auto noisy = [&](int64_t token, uint32_t word) {
    const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
    return x[token] + static_cast<float>(-__builtin_log(-__builtin_log(u)));
  };
  uint32_t words[kLanes];
  philox(seed, static_cast<uint32_t>(likely), position, choice, words);
  float best = noisy(likely, words[0]);
  int32_t winner = likely;
  const F least = set1(bound), slack = set1(1.001f), tiny = set1(1e-9f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F v = load_n(x + i, n - i);
    uint32_t alive = bits(at_least(v, least));
    if (n - i < kLanes) alive &= (1u << (n - i)) - 1;
    if (!alive) continue;
    const I word = philox_words(seed, static_cast<uint32_t>(i), position, choice);
    // 1 − u from the complement's upper 24 bits, rounded down
    const F one_minus_u = to_float(shr<8>(word ^ iset1(-1))) * set1(0x1p-24f);
    alive &= bits(at_least(fma(exp(v - set1(best)), slack, tiny), one_minus_u));
    if (!alive) continue;
    int32_t lanes[kLanes];
    istore(lanes, word);
    for (; alive; alive &= alive - 1) {
      const int j = __builtin_ctz(alive);
      const float value = noisy(i + j, static_cast<uint32_t>(lanes[j]));
      const auto token = static_cast<int32_t>(i + j);
      if (value > best || (value == best && token < winner)) {
        best = value;
        winner = token;
      }
    }
  }
  return winner;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
