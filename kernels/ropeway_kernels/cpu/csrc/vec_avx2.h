// AVX2 + FMA + F16C: eight floats. See vec.h for what a vector type must offer.
#pragma once

#include <immintrin.h>

#include "types.h"

namespace ropeway {
namespace {

struct Avx2 {
    using F = __m256;
    static constexpr int kLanes = 8;
    // A tile of 6 x 16 is 12 accumulators, two weights and one activation of 16 registers; splitting pairs takes the
    // last one, for a mask.
    static constexpr int kPanelVectors = 2;
    static constexpr int kTileRows = 6;
    static constexpr int kPairTileRows = 6;
    static constexpr int kPairQueryRows = 5;  // six are slower: attention's addresses need registers too
    static constexpr bool kDotBf16 = false;

    static F zero() { return _mm256_setzero_ps(); }
    static F set(float x) { return _mm256_set1_ps(x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    // In a tile GCC would mix in the form that overwrites a factor, and then move registers about.
    static void accumulate(F& sum, F a, F b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }
    static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // A biased exponent of 0 is 0, one of 255 is infinity.
    static F pow2(F n) {
        const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
    }
    static F sign_of(F magnitude, F sign) {
        const F mask = _mm256_set1_ps(-0.0f);
        return _mm256_or_ps(_mm256_andnot_ps(mask, magnitude), _mm256_and_ps(mask, sign));
    }
    // a < b ? x : y
    static F select_less(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
    static F iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

    static float sum(F a) {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    static float max_of(F a) {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static F load(const bf16* p) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    static F load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
    static void store(bf16* p, F a) {
        // Round to nearest even; a NaN keeps its quiet bit instead of being rounded to infinity.
        const __m256i bits = _mm256_castps_si256(a);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        const __m256i rounded = _mm256_add_epi32(bits, bias);
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
        const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
        const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
    }
    static void store(f16* p, F a) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    }

    static void store(int8_t* p, F a) {
        const __m256i whole = _mm256_cvtps_epi32(a);
        const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(half, half));
    }

    // kLanes interleaved pairs along K, the even (0) or the odd (1) element of each.
    static F load_pair(const bf16* p, int which) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm256_castsi256_ps(which == 0 ? _mm256_slli_epi32(pairs, 16)
                                              : _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    }
};

}  // namespace
}  // namespace ropeway
