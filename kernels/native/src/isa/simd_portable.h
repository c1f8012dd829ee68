// Sixteen lanes as plain arrays: what any C++17 compiler makes of them. Same results as the intrinsics, bit for bit.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo::OCTAVO_ISA {
namespace {

struct I {
  int32_t v[16];
};
struct F {
  float v[16];
};
struct M {
  uint32_t v;
};

#define OCTAVO_EACH for (int i = 0; i < 16; ++i)

inline F set1(float x) {
  F r;
  OCTAVO_EACH r.v[i] = x;
  return r;
}
inline F zero() { return set1(0.0f); }
inline F load(const float* p) {
  F r;
  OCTAVO_EACH r.v[i] = p[i];
  return r;
}
inline F load_n(const float* p, int64_t n) {
  F r;
  OCTAVO_EACH r.v[i] = i < n ? p[i] : 0.0f;
  return r;
}
inline void store(float* p, F x) { OCTAVO_EACH p[i] = x.v[i]; }
inline void store_n(float* p, int64_t n, F x) {
  for (int i = 0; i < 16 && i < n; ++i) p[i] = x.v[i];
}

#define OCTAVO_LANEWISE(RESULT, NAME, ARGUMENTS, EXPRESSION) \
  inline RESULT NAME ARGUMENTS {                             \
    RESULT r;                                                \
    OCTAVO_EACH r.v[i] = EXPRESSION;                         \
    return r;                                                \
  }
inline int32_t wrap(uint32_t x) { return static_cast<int32_t>(x); }
inline uint32_t bits_of(int32_t x) { return static_cast<uint32_t>(x); }
inline uint32_t bits_of(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}
inline float float_of(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}
inline int32_t round_even(float x) {  // |x| < 2^22, which is all that the kernels ask
  return wrap(bits_of(x + 12582912.0f) - 0x4B400000u);
}
inline float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 1023u;
  if (exponent == 31) return float_of(sign | 0x7F800000u | mantissa << 13);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  const float tiny = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -tiny : tiny;
}

OCTAVO_LANEWISE(F, operator+, (F a, F b), a.v[i] + b.v[i])
OCTAVO_LANEWISE(F, operator-, (F a, F b), a.v[i] - b.v[i])
OCTAVO_LANEWISE(F, operator*, (F a, F b), a.v[i] * b.v[i])
OCTAVO_LANEWISE(F, operator/, (F a, F b), a.v[i] / b.v[i])
OCTAVO_LANEWISE(F, fma, (F a, F b, F c), __builtin_fmaf(a.v[i], b.v[i], c.v[i]))
OCTAVO_LANEWISE(F, max, (F a, F b), a.v[i] > b.v[i] ? a.v[i] : b.v[i])
OCTAVO_LANEWISE(F, min, (F a, F b), a.v[i] < b.v[i] ? a.v[i] : b.v[i])
OCTAVO_LANEWISE(F, abs, (F a), __builtin_fabsf(a.v[i]))
OCTAVO_LANEWISE(I, iset1, (int32_t x), x)
OCTAVO_LANEWISE(I, operator+, (I a, I b), wrap(bits_of(a.v[i]) + bits_of(b.v[i])))
OCTAVO_LANEWISE(I, operator&, (I a, I b), a.v[i] & b.v[i])
OCTAVO_LANEWISE(I, operator^, (I a, I b), a.v[i] ^ b.v[i])
template <int B> OCTAVO_LANEWISE(I, shl, (I a), wrap(bits_of(a.v[i]) << B))
template <int B> OCTAVO_LANEWISE(I, shr, (I a), wrap(bits_of(a.v[i]) >> B))
template <int B> OCTAVO_LANEWISE(I, sar, (I a), a.v[i] >> B)
OCTAVO_LANEWISE(I, round, (F a), round_even(a.v[i]))
OCTAVO_LANEWISE(F, to_float, (I a), static_cast<float>(a.v[i]))
OCTAVO_LANEWISE(F, as_float, (I a), float_of(bits_of(a.v[i])))
OCTAVO_LANEWISE(I, as_int, (F a), wrap(bits_of(a.v[i])))
OCTAVO_LANEWISE(F, select, (M m, F yes, F no), m.v >> i & 1u ? yes.v[i] : no.v[i])
OCTAVO_LANEWISE(F, load_half, (const uint16_t* p), half_to_float(p[i]))

inline void istore(int32_t* p, I x) { std::memcpy(p, x.v, 64); }
inline I iload(const void* p) {
  I r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void mul_wide(I a, uint32_t b, I& high, I& low) {  // unsigned 32 × 32 → 64
  OCTAVO_EACH {
    const uint64_t product = static_cast<uint64_t>(bits_of(a.v[i])) * b;
    low.v[i] = wrap(static_cast<uint32_t>(product));
    high.v[i] = wrap(static_cast<uint32_t>(product >> 32));
  }
}

#define OCTAVO_COMPARE(NAME, ARGUMENTS, EXPRESSION)                   \
  inline M NAME ARGUMENTS {                                           \
    uint32_t m = 0;                                                   \
    OCTAVO_EACH m |= static_cast<uint32_t>(EXPRESSION) << i;          \
    return {m};                                                       \
  }
OCTAVO_COMPARE(less, (F a, F b), a.v[i] < b.v[i])
OCTAVO_COMPARE(at_least, (F a, F b), a.v[i] >= b.v[i])
OCTAVO_COMPARE(is_nan, (F a), a.v[i] != a.v[i])
inline uint32_t bits(M m) { return m.v; }
inline M from_bits(uint32_t b) { return {b}; }

inline float reduce_add(F a) {  // lanes i and i + 8, then + 4, + 2, + 1
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
inline float reduce_max(F a) {
  float m = a.v[0];
  OCTAVO_EACH m = a.v[i] > m ? a.v[i] : m;
  return m;
}

// 16 pairs of 16-bit or 8-bit elements → the even and the odd ones as floats
inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  OCTAVO_EACH {
    even.v[i] = float_of(static_cast<uint32_t>(p[2 * i]) << 16);
    odd.v[i] = float_of(static_cast<uint32_t>(p[2 * i + 1]) << 16);
  }
}
inline void load_i8_pairs(const int8_t* p, F& even, F& odd) {
  OCTAVO_EACH {
    even.v[i] = p[2 * i];
    odd.v[i] = p[2 * i + 1];
  }
}
inline void store_bytes(int8_t* p, I x) {  // values fit; in kByteOrder
  OCTAVO_EACH p[i] = static_cast<int8_t>(x.v[i / 8 * 8 + kByteOrder[i % 8]]);
}
inline void store_low16(uint16_t* p, I x) { OCTAVO_EACH p[i] = static_cast<uint16_t>(x.v[i]); }

// Σ over 4 bytes of each lane: lane += u8 · s8
struct Dot {
  static I u8s8(I sum, I u, I s) {
    uint8_t a[64];
    int8_t b[64];
    std::memcpy(a, u.v, 64);
    std::memcpy(b, s.v, 64);
    OCTAVO_EACH for (int j = 0; j < 4; ++j) sum.v[i] += a[4 * i + j] * b[4 * i + j];
    return sum;
  }
  static I u4s8(I sum, I u, I s) { return u8s8(sum, u, s); }
};
template <typename Change> inline I each_byte(I a, Change change) {
  uint8_t b[64];
  std::memcpy(b, a.v, 64);
  for (uint8_t& x : b) x = static_cast<uint8_t>(change(x));
  std::memcpy(a.v, b, 64);
  return a;
}
inline I low_nibbles(I a) {
  return each_byte(a, [](int x) { return x & 15; });
}
inline I high_nibbles(I a) {
  return each_byte(a, [](int x) { return x >> 4; });
}
inline I flip_sign_bytes(I a) {  // s8 → u8 = s8 + 128
  return each_byte(a, [](int x) { return x ^ 128; });
}

#undef OCTAVO_COMPARE
#undef OCTAVO_LANEWISE
#undef OCTAVO_EACH

}  // namespace
}  // namespace octavo::OCTAVO_ISA
