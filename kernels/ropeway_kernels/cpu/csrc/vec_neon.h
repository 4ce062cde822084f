// NEON of 64-bit ARM: four floats. See vec.h for what a vector type must offer.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "types.h"

namespace ropeway {
namespace {

struct Neon {
    using F = float32x4_t;
    static constexpr int kLanes = 4;
    // A tile of 7 x 12 is 21 accumulators, three weights and seven activations of 32 registers: compilers multiply by a
    // lane of a register, so they load a whole column of activations. Splitting pairs takes more.
    static constexpr int kPanelVectors = 3;
    static constexpr int kTileRows = 7;
    static constexpr int kPairTileRows = 5;
    static constexpr int kPairQueryRows = 5;
    static constexpr bool kDotBf16 = false;

    static F zero() { return vdupq_n_f32(0.0f); }
    static F set(float x) { return vdupq_n_f32(x); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    // The processor's own maximum and minimum treat a NaN differently from vec.h.
    static F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
    static F min(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static void accumulate(F& sum, F a, F b) { sum = fma(a, b, sum); }
    static F round(F a) { return vrndnq_f32(a); }
    static F pow2(F n) {
        const int32x4_t biased = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
        return vreinterpretq_f32_s32(vshlq_n_s32(biased, 23));
    }
    static F sign_of(F magnitude, F sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude); }
    static F select_less(F a, F b, F x, F y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
    static F iota() {
        static constexpr float kLane[4] = {0, 1, 2, 3};
        return vld1q_f32(kLane);
    }

    static float sum(F a) { return vaddvq_f32(a); }
    static float max_of(F a) { return vmaxvq_f32(a); }

    static F load(const float* p) { return vld1q_f32(p); }
    static F load(const bf16* p) {
        return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(&p->bits)), 16));
    }
    static F load(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
    static void store(float* p, F a) { vst1q_f32(p, a); }
    static void store(bf16* p, F a) {
        // As in vec_avx2.h.
        const uint32x4_t bits = vreinterpretq_u32_f32(a);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        vst1_u16(&p->bits, vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16));
    }
    static void store(f16* p, F a) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(a))); }

    static void store(int8_t* p, F a) {
        const int16x4_t half = vmovn_s32(vcvtnq_s32_f32(a));
        const int8x8_t bytes = vmovn_s16(vcombine_s16(half, half));
        std::memcpy(p, &bytes, kLanes);
    }

    static F load_pair(const bf16* p, int which) {
        const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(&p->bits));
        return vreinterpretq_f32_u32(which == 0 ? vshlq_n_u32(pairs, 16) : vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
    }
};

}  // namespace
}  // namespace ropeway
