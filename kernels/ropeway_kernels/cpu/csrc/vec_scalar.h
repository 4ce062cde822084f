// Any processor: four floats in the compiler's own vector type. See vec.h for what a vector type must offer.
//
// The last resort. Nothing here needs more than float and 32-bit integer arithmetic; where the processor has vectors of
// any kind the compiler uses them.
#pragma once

#include <cstring>

#include "types.h"

namespace ropeway {
namespace {

struct Scalar {
    using F = float __attribute__((vector_size(16)));
    static constexpr int kLanes = 4;
    // 4 x 8 fits the 16 registers of an old x86-64, with the product beside the sum.
    static constexpr int kPanelVectors = 2;
    static constexpr int kTileRows = 4;
    static constexpr int kPairTileRows = 4;
    static constexpr int kPairQueryRows = 4;
    static constexpr bool kDotBf16 = false;

    static F zero() { return F{}; }
    static F set(float x) { return F{x, x, x, x}; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F max(F a, F b) { return a > b ? a : b; }
    static F min(F a, F b) { return a < b ? a : b; }
    // Two roundings: one rounding in software is fifty times slower.
    static F fma(F a, F b, F c) { return a * b + c; }
    static void accumulate(F& sum, F a, F b) { sum = fma(a, b, sum); }
    static F round(F a) { return (a + kRounding) - kRounding; }
    static F pow2(F n) { return floats((__builtin_convertvector(n, I) + 127) << 23); }
    static F sign_of(F magnitude, F sign) {
        return floats((bits(magnitude) & kMagnitude) | (bits(sign) & ~kMagnitude));
    }
    static F select_less(F a, F b, F x, F y) { return a < b ? x : y; }
    static F iota() { return F{0, 1, 2, 3}; }

    static float sum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
    static float max_of(F a) {
        const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
        return x > y ? x : y;
    }

    static F load(const float* p) { return read<F>(p); }
    static F load(const bf16* p) { return floats(wide(p) << 16); }
    static F load(const f16* p) {
        const U half = wide(p);
        const U magnitude = (half & 0x7fff) << 13;
        // The exponents' biases differ by 112. A product, not a sum, so that subnormals come out normal.
        const U finite = bits(floats(magnitude) * 0x1p112f);
        const U value = magnitude < 0x0f800000u ? finite : (magnitude | 0x7f800000u);  // or infinite, or NaN
        return floats(value | (half & 0x8000) << 16);
    }
    static void store(float* p, F a) { std::memcpy(p, &a, sizeof(a)); }
    static void store(bf16* p, F a) {
        // Round to nearest even; a NaN keeps its quiet bit instead of being rounded to infinity.
        const U from = bits(a);
        const U rounded = from + 0x7fff + ((from >> 16) & 1);
        narrow(p, (a == a ? rounded : (from | 0x400000)) >> 16);
    }
    static void store(f16* p, F a) {
        const U from = bits(a) & kMagnitude;
        // Below 2^-14 the result counts units of 2^-24, which is what the last bit of 0.5 + x is worth.
        const U subnormal = bits(floats(from) + 0.5f) - 0x3f000000u;
        const U rebased = from - (112u << 23);
        const U normal = (rebased + 0xfff + ((rebased >> 13) & 1)) >> 13;
        const U finite = from < 0x38800000u ? subnormal : (normal < 0x7c00u ? normal : U{} + 0x7c00u);
        const U value = from > 0x7f800000u ? (0x7e00u | ((from >> 13) & 0x3ff)) : finite;
        narrow(p, value | ((bits(a) >> 16) & 0x8000));
    }

    static void store(int8_t* p, F a) {
        const Bytes bytes = __builtin_convertvector(__builtin_convertvector(round(a), I), Bytes);
        std::memcpy(p, &bytes, sizeof(bytes));
    }

    static F load_pair(const bf16* p, int which) {
        F pair;
        for (int i = 0; i < kLanes; ++i) {
            const uint32_t word = static_cast<uint32_t>(p[2 * i + which].bits) << 16;
            float value;
            std::memcpy(&value, &word, sizeof(value));
            pair[i] = value;
        }
        return pair;
    }

private:
    using I = int32_t __attribute__((vector_size(16)));
    using U = uint32_t __attribute__((vector_size(16)));
    using Half = uint16_t __attribute__((vector_size(8)));
    using Bytes = int8_t __attribute__((vector_size(4)));
    static constexpr float kRounding = 0x1.8p23f;  // leaves no bit for a fraction
    static constexpr uint32_t kMagnitude = 0x7fffffffu;

    template <class To>
    static To read(const void* p) {
        To value;
        std::memcpy(&value, p, sizeof(value));
        return value;
    }
    static U bits(F a) { return read<U>(&a); }
    static F floats(U a) { return read<F>(&a); }
    static F floats(I a) { return read<F>(&a); }
    static U wide(const void* p) { return __builtin_convertvector(read<Half>(p), U); }
    static void narrow(void* p, U a) {
        const Half half = __builtin_convertvector(a, Half);
        std::memcpy(p, &half, sizeof(half));
    }
};

}  // namespace
}  // namespace ropeway
