// Sixteen lanes in two AVX2 registers (with FMA and F16C, as on every AVX2 machine since Haswell).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace octavo::OCTAVO_ISA {
namespace {

struct I {
  __m256i a, b;
};
struct F {
  __m256 a, b;
};
struct M {
  __m256 a, b;
};

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256i first(int64_t n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(n < 0 ? 0 : n)), lane);
}
inline F load_n(const float* p, int64_t n) {
  return {_mm256_maskload_ps(p, first(n)), _mm256_maskload_ps(p + 8, first(n - 8))};
}
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store_n(float* p, int64_t n, F x) {
  _mm256_maskstore_ps(p, first(n), x.a);
  _mm256_maskstore_ps(p + 8, first(n - 8), x.b);
}
inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}

inline I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I operator&(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I operator^(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int B> inline I shl(I x) { return {_mm256_slli_epi32(x.a, B), _mm256_slli_epi32(x.b, B)}; }
template <int B> inline I shr(I x) { return {_mm256_srli_epi32(x.a, B), _mm256_srli_epi32(x.b, B)}; }
template <int B> inline I sar(I x) { return {_mm256_srai_epi32(x.a, B), _mm256_srai_epi32(x.b, B)}; }
inline I round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }  // to nearest even
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline void istore(int32_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, x.b);
}
inline I iload(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void mul_wide_half(__m256i a, __m256i m, __m256i& high, __m256i& low) {
  const __m256i even = _mm256_mul_epu32(a, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
inline void mul_wide(I x, uint32_t y, I& high, I& low) {  // unsigned 32 × 32 → 64
  const __m256i m = _mm256_set1_epi32(static_cast<int32_t>(y));
  mul_wide_half(x.a, m, high.a, low.a);
  mul_wide_half(x.b, m, high.b, low.b);
}

inline M less(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
inline M at_least(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)}; }
inline M is_nan(F x) { return {_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)}; }
inline F select(M m, F yes, F no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }
inline uint32_t bits(M m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a)) | static_cast<uint32_t>(_mm256_movemask_ps(m.b)) << 8;
}
inline __m256 half_mask(uint32_t b) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(b)), bit);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit));
}
inline M from_bits(uint32_t b) { return {half_mask(b & 255), half_mask(b >> 8 & 255)}; }

inline float reduce_add(F x) {  // lanes i and i + 8, then + 4, + 2, + 1
  const __m256 h = _mm256_add_ps(x.a, x.b);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float reduce_max(F x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}

// 16 pairs of 16-bit or 8-bit elements → the even and the odd ones as floats
inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  const I v = iload(p);
  even = as_float(shl<16>(v));
  odd = as_float(v & iset1(static_cast<int32_t>(0xFFFF0000u)));
}
inline void load_i8_pairs(const int8_t* p, F& even, F& odd) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  const I v = {_mm256_cvtepi16_epi32(_mm_loadu_si128(q)), _mm256_cvtepi16_epi32(_mm_loadu_si128(q + 1))};
  even = to_float(sar<24>(shl<24>(v)));
  odd = to_float(sar<8>(v));
}
inline F load_half(const uint16_t* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline __m256i in_order(__m256i packed) { return _mm256_permute4x64_epi64(packed, 0xD8); }
inline void store_bytes(int8_t* p, I x) {  // values fit; in kByteOrder
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  const __m256i words = in_order(_mm256_packs_epi32(x.a, x.b));
  const __m256i bytes = in_order(_mm256_packs_epi16(words, words));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(_mm256_castsi256_si128(bytes), order));
}
inline void store_low16(uint16_t* p, I x) {
  const __m256i low = _mm256_set1_epi32(0xFFFF);
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), in_order(words));
}

// Σ over 4 bytes of each lane: lane += u8 · s8. maddubs saturates at 16 bits, so bytes above 127 go in two halves.
struct Dot {
  static __m256i half(__m256i sum, __m256i u, __m256i s) {
    const __m256i one = _mm256_set1_epi16(1), top = _mm256_set1_epi8(-128);
    const __m256i low = _mm256_maddubs_epi16(_mm256_andnot_si256(top, u), s);
    const __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(top, u), s);
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(low, one), _mm256_madd_epi16(high, one)));
  }
  static __m256i small(__m256i sum, __m256i u, __m256i s) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
  }
  static I u8s8(I sum, I u, I s) { return {half(sum.a, u.a, s.a), half(sum.b, u.b, s.b)}; }
  static I u4s8(I sum, I u, I s) { return {small(sum.a, u.a, s.a), small(sum.b, u.b, s.b)}; }
};
inline I low_nibbles(I x) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline I high_nibbles(I x) { return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
inline I flip_sign_bytes(I x) {  // s8 → u8 = s8 + 128
  const __m256i top = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(x.a, top), _mm256_xor_si256(x.b, top)};
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
