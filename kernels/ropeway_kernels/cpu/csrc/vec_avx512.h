// AVX-512 (F, BW, DQ, VL): sixteen floats; and the same with the dot product of bf16 pairs. See vec.h.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own headers leave the unused operand of a masked instruction unset on purpose, and warn of it.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cstring>

#include "types.h"
#include "vec_avx2.h"

namespace ropeway {
namespace {

struct Avx512 {
    using F = __m512;
    static constexpr int kLanes = 16;
    // A tile of 8 x 48 is 24 accumulators, three weights, one activation and the mask of pairs, of 32 registers.
    static constexpr int kPanelVectors = 3;
    static constexpr int kTileRows = 8;
    static constexpr int kPairTileRows = 8;
    static constexpr int kPairQueryRows = 8;
    static constexpr bool kDotBf16 = false;

    static F zero() { return _mm512_setzero_ps(); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static void accumulate(F& sum, F a, F b) { sum = fma(a, b, sum); }
    static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F pow2(F n) {
        const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
        return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
    }
    static F sign_of(F magnitude, F sign) {
        const F mask = _mm512_set1_ps(-0.0f);
        return _mm512_or_ps(_mm512_andnot_ps(mask, magnitude), _mm512_and_ps(mask, sign));
    }
    static F select_less(F a, F b, F x, F y) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
    }
    static F iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

    static float sum(F a) { return Avx2::sum(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1))); }
    static float max_of(F a) {
        return Avx2::max_of(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
    }

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F load(const bf16* p) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    static F load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
    static void store(bf16* p, F a) {
        // As in vec_avx2.h.
        const __m512i bits = _mm512_castps_si512(a);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
        const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
        const __m512i high = _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
    }
    static void store(f16* p, F a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    }

    static void store(int8_t* p, F a) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
    }

    static F load_pair(const bf16* p, int which) {
        const __m512i pairs = _mm512_loadu_si512(p);
        return _mm512_castsi512_ps(which == 0
                                       ? _mm512_slli_epi32(pairs, 16)
                                       : _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }
};

#ifdef __AVX512BF16__
struct Avx512Bf16 : Avx512 {
    static constexpr bool kDotBf16 = true;
    using Pair = __m512bh;

    static Pair load_pairs(const bf16* p) { return as_pair(_mm512_loadu_si512(p)); }
    static Pair broadcast_pair(const bf16* p) {
        int32_t pair;
        std::memcpy(&pair, p, sizeof(pair));
        return as_pair(_mm512_set1_epi32(pair));
    }
    static F dot(F sum, Pair a, Pair b) { return _mm512_dpbf16_ps(sum, a, b); }

    using Avx512::store;
    static void store(bf16* p, F a) {  // rounds as the other does, but takes subnormals for zeros
        const __m256bh half = _mm512_cvtneps_pbh(a);
        std::memcpy(p, &half, sizeof(half));
    }

private:
    // The element type of __m512bh differs between compilers; this is no instruction in any of them.
    static Pair as_pair(__m512i bits) {
        Pair pair;
        std::memcpy(&pair, &bits, sizeof(pair));
        return pair;
    }
};
#endif

}  // namespace
}  // namespace ropeway
