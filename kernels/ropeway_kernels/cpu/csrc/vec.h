// What a vector type must offer. No code: each vec_*.h holds one type, and the kernels are templates on it.
//
//   F                       a vector of kLanes floats
//   kPanelVectors           vectors in a panel of packed weights, the width of the register tile
//   kTileRows               rows of the tallest register tile
//   kPairTileRows           the same for bf16 weights
//   kPairQueryRows          the same for bf16 keys and values; times kPanelVectors, the sums that attention's tiles keep
//   kDotBf16                there are Pair and dot, and activations for bf16 weights are bf16 too
//
//   zero() set(x) iota()    0, x, and 0 1 2 ... in each lane
//   add sub mul div (a, b)
//   fma(a, b, c)            a * b + c, rounded once if the processor can do that
//   accumulate(sum, a, b)   sum = fma(a, b, sum)
//   max(a, b) min(a, b)     a > b ? a : b and a < b ? a : b, so b where either is NaN
//   round(a)                nearest whole number, ties to even, of |a| < 2^22
//   pow2(n)                 2^n for whole n in [-126, 127], 0 for -127, infinity for 128
//   sign_of(magnitude, sign)    |magnitude| with the other's sign
//   select_less(a, b, x, y)     a < b ? x : y; y where a or b is NaN
//   sum(a) max_of(a)        over the lanes, always in the same order; max_of of numbers only
//
//   load(p) store(p, a)     for float, bf16 and f16, at any address; stores round to nearest even, and NaN stays NaN
//   store(p, a)             for int8, |a| <= 127: the nearest whole numbers, ties to even
//   load_pair(p, which)     p: kLanes interleaved pairs of bf16; the even (0) or odd (1) element of each
//
// With kDotBf16:
//   Pair                    kLanes pairs of bf16
//   load_pairs(p)           as they lie at p
//   broadcast_pair(p)       the one pair at p in every lane
//   dot(sum, a, b)          sum + a.even * b.even + a.odd * b.odd in each lane; may treat subnormals as 0
#pragma once
