// exp and tanh of a vector.
//
// Owns: their approximations. Must not know: what they are for, instruction sets.
// Called by: attention.h, elementwise.h, sampling.h.
// Coefficients are minimax fits over the reduced range. A lane's result depends only on that lane, so a value is the
// same wherever it stands in a vector.
#pragma once

#include "tile.h"  // ROPEWAY_INLINE

namespace ropeway {
namespace {

// e^x within 1.5 ulp. Exactly 0 below about -87.7 (and for -infinity), infinity above about 88.4, NaN for NaN.
template <class V>
ROPEWAY_INLINE typename V::F exp(typename V::F x) {
    using F = typename V::F;
    // Of two operands of which one is NaN, min and max give the second. The bounds lead to 2^-127, which pow2 makes 0,
    // and to 2^128, which it makes infinity.
    const F inside = V::max(V::set(-88.0f), V::min(V::set(88.6f), x));
    // e^x = 2^n e^r with |r| <= ln(2) / 2. The two parts of ln(2) together hold 48 bits of it.
    const F n = V::round(V::mul(inside, V::set(1.44269504f)));
    F r = V::fma(n, V::set(-0.693147182f), inside);
    r = V::fma(n, V::set(1.90465421e-9f), r);
    F p = V::fma(V::set(0.001381454f), r, V::set(0.0083687452f));
    p = V::fma(p, r, V::set(0.0416683908f));
    p = V::fma(p, r, V::set(0.166665204f));
    p = V::fma(p, r, V::set(0.4999999343f));
    p = V::add(V::fma(V::mul(r, r), p, r), V::set(1.0f));
    return V::mul(p, V::pow2(n));
}

// tanh(x) within 2 ulp; NaN for NaN.
template <class V>
ROPEWAY_INLINE typename V::F tanh(typename V::F x) {
    using F = typename V::F;
    const F one = V::set(1.0f);
    const F magnitude = V::min(V::set(10.0f), V::sign_of(x, V::zero()));  // the tanh of 10 is 1 in single precision
    // Near 0 an odd polynomial: the other formula would lose digits there.
    const F square = V::mul(magnitude, magnitude);
    F p = V::fma(V::set(-0.0057049854f), square, V::set(0.0206390858f));
    p = V::fma(p, square, V::set(-0.0537397146f));
    p = V::fma(p, square, V::set(0.1333144219f));
    p = V::fma(p, square, V::set(-0.3333328194f));
    const F near = V::fma(V::mul(p, square), magnitude, magnitude);
    const F far = V::sub(one, V::div(V::set(2.0f), V::add(exp<V>(V::add(magnitude, magnitude)), one)));
    return V::sign_of(V::select_less(magnitude, V::set(0.625f), near, far), x);
}

}  // namespace
}  // namespace ropeway
