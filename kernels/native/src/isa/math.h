// Elementary functions on sixteen lanes, from the same polynomials on every ISA.
#pragma once

namespace octavo::OCTAVO_ISA {
namespace {

// e^x to about 1.5 ulp; 0 below −87.3, where the result would be denormal; NaN stays NaN. exp(0) is exactly 1.
inline F exp(F x) {
  const F lowest = set1(-87.3f);
  const M vanishes = less(x, lowest);
  x = min(set1(88.7f), max(lowest, x));
  const I n = round(x * set1(1.44269504f));
  const F fn = to_float(n);
  F r = fma(fn, set1(-0.693359375f), x);
  r = fma(fn, set1(2.12194440e-4f), r);
  F p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  // 2^n in two factors: n reaches 128
  const I half = sar<1>(n);
  const F scale = as_float(shl<23>(half + iset1(127)));
  const F rest = as_float(shl<23>(n + (half ^ iset1(-1)) + iset1(128)));
  return select(vanishes, zero(), p * scale * rest);
}

// Odd series near 0, where 1 − 2/(e^2x + 1) would cancel.
inline F tanh(F x) {
  const F magnitude = abs(x);
  const F x2 = x * x;
  F p = set1(62.0f / 2835);
  p = fma(p, x2, set1(-17.0f / 315));
  p = fma(p, x2, set1(2.0f / 15));
  p = fma(p, x2, set1(-1.0f / 3));
  const F small = fma(p * x2, x, x);
  const F large = set1(1.0f) - set1(2.0f) / (exp(magnitude + magnitude) + set1(1.0f));
  const F signed_large = select(less(x, zero()), zero() - large, large);
  return select(less(magnitude, set1(0.18f)), small, signed_large);
}

// erfc(z) · exp(z²) · (1 + 2z) for z >= 0: a polynomial in t = (z − 3.75)/(z + 3.75), the variable of Shepherd and
// Laframboise (Math. Comp. 36, 1981); a least-squares fit of degree 10 over z in [0, 11], relative error 1.4e-7.
inline F erfc_scaled(F z) {
  constexpr float kFit[] = {1.23751259f,   -0.140240476f, 0.00358483871f, 0.0822715163f,  -0.108795814f, 0.0923709273f,
                            -0.058699429f, 0.028038064f,  -0.0100052049f, 0.00222694036f, 0.00106993446f};
  const F t = (z - set1(3.75f)) / (z + set1(3.75f));
  F p = set1(kFit[10]);
  for (int i = 9; i >= 0; --i) p = fma(p, t, set1(kFit[i]));
  return p;
}

// Φ(x) of the normal distribution.
inline F normal_cdf(F x) {
  const F z = min(set1(11.0f), abs(x) * set1(0.707106781f));
  const F tail = set1(0.5f) * exp(zero() - z * z) * (erfc_scaled(z) / fma(set1(2.0f), z, set1(1.0f)));
  return select(less(x, zero()), tail, set1(1.0f) - tail);
}

template <Activation A> inline F activate(F x) {
  if constexpr (A == Activation::silu) {
    return x / (set1(1.0f) + exp(zero() - x));
  } else if constexpr (A == Activation::gelu) {
    return x * normal_cdf(x);
  } else if constexpr (A == Activation::gelu_tanh) {
    const F inner = set1(0.797884561f) * fma(set1(0.044715f) * x, x * x, x);
    return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
  } else {
    return max(zero(), x);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
