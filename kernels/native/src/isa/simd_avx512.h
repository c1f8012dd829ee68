// Sixteen lanes in one AVX-512 register.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace octavo::OCTAVO_ISA {
namespace {

struct I {
  __m512i v;
};
struct F {
  __m512 v;
};
struct M {
  __mmask16 v;
};

inline __mmask16 first(int64_t n) {
  return n >= 16 ? 0xFFFF : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
}

inline F zero() { return {_mm512_setzero_ps()}; }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline void store_n(float* p, int64_t n, F x) { _mm512_mask_storeu_ps(p, first(n), x.v); }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }

inline I iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I operator^(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int B> inline I shl(I a) { return {_mm512_slli_epi32(a.v, B)}; }
template <int B> inline I shr(I a) { return {_mm512_srli_epi32(a.v, B)}; }
template <int B> inline I sar(I a) { return {_mm512_srai_epi32(a.v, B)}; }
inline I round(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest even
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
inline I as_int(F a) { return {_mm512_castps_si512(a.v)}; }
inline void istore(int32_t* p, I x) { _mm512_storeu_si512(p, x.v); }
inline I iload(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void mul_wide(I a, uint32_t b, I& high, I& low) {  // unsigned 32 × 32 → 64
  const __m512i m = _mm512_set1_epi32(static_cast<int32_t>(b));
  const __m512i even = _mm512_mul_epu32(a.v, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), m);
  low.v = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  high.v = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}

inline M less(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline M at_least(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline M is_nan(F a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
inline F select(M m, F yes, F no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
inline uint32_t bits(M m) { return m.v; }
inline M from_bits(uint32_t b) { return {static_cast<__mmask16>(b)}; }

inline float reduce_add(F a) {  // lanes i and i + 8, then + 4, + 2, + 1
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float reduce_max(F a) { return _mm512_reduce_max_ps(a.v); }

// 16 pairs of 16-bit or 8-bit elements → the even and the odd ones as floats
inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  const __m512i v = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000u))));
}
inline void load_i8_pairs(const int8_t* p, F& even, F& odd) {
  const __m512i v = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  even.v = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24));
  odd.v = _mm512_cvtepi32_ps(_mm512_srai_epi32(v, 8));
}
inline F load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_bytes(int8_t* p, I x) {  // values fit; in kByteOrder
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(x.v), order));
}
inline void store_low16(uint16_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v));
}

// Σ over 4 bytes of each lane: lane += u8 · s8, exact in 32 bits
struct Dot {
  static I u8s8(I sum, I u, I s) { return {_mm512_dpbusd_epi32(sum.v, u.v, s.v)}; }
  static I u4s8(I sum, I u, I s) { return u8s8(sum, u, s); }
};
inline I low_nibbles(I a) { return a & I{_mm512_set1_epi8(15)}; }
inline I high_nibbles(I a) { return I{_mm512_srli_epi16(a.v, 4)} & I{_mm512_set1_epi8(15)}; }
inline I flip_sign_bytes(I a) { return a ^ I{_mm512_set1_epi8(-128)}; }  // s8 → u8 = s8 + 128

}  // namespace
}  // namespace octavo::OCTAVO_ISA
