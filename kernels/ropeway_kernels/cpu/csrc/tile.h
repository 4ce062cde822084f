// The register tile: the one inner loop under linears and attention.
//
// Owns: how a strip of activations meets a strip of packed K-major data, and in which order K is summed.
// Must not know: what the operands are. Called by: linear.h, attention.h.
//
// Every output is one chain of fused multiply-adds over k = 0, 1, 2, ... whatever the shape of the tile. So a result
// does not depend on how many rows or panels were computed together; that is what "same answer in any batch" rests on.
#pragma once

#include <type_traits>
#include <utility>

#include "types.h"

#define ROPEWAY_INLINE inline __attribute__((always_inline))
#define ROPEWAY_LAMBDA __attribute__((always_inline))

namespace ropeway {
namespace {

// How one step along K is multiplied. A: what activations must be converted to; kStep: elements of K that lie together.
template <class V, class T>
struct Mac {
    static constexpr bool kPaired = std::is_same_v<T, bf16>;
    static constexpr bool kDot = kPaired && V::kDotBf16;  // the instruction takes the pair as it is
    static constexpr int kStep = kPaired ? 2 : 1;
    static constexpr int kRows = kPaired ? V::kPairTileRows : V::kTileRows;  // of the tallest tile
    using A = std::conditional_t<kDot, bf16, float>;
};

// body(0), body(1), ... with constant arguments. Loops over registers must be gone before the compiler places variables.
template <int kCount, class Body, int... kIndex>
ROPEWAY_INLINE void unrolled(const Body& body, std::integer_sequence<int, kIndex...>) {
    (body(std::integral_constant<int, kIndex>()), ...);
}
template <int kCount, class Body>
ROPEWAY_INLINE void unroll(const Body& body) {
    unrolled<kCount>(body, std::make_integer_sequence<int, kCount>());
}

struct Nothing {
    ROPEWAY_INLINE void operator()(int64_t) const {}
};

// acc[m][p * kVectors + v] += a[m, 0:k] . b[p][0:k, v-th vector of columns]
//   a: rows lda elements apart. b: one pointer per panel; ldb elements from one K step of a panel to the next.
//   beside(i): called before step i, to prefetch what comes next.
template <class V, class T, int kRows, int kPanels, int kVectors, class Beside = Nothing>
ROPEWAY_INLINE void tile(const typename Mac<V, T>::A* a, int64_t lda, const T* const* b, int64_t ldb, int64_t k,
                         typename V::F (&out)[kRows][kPanels * kVectors], const Beside& beside = {}) {
    using M = Mac<V, T>;
    using F = typename V::F;
    constexpr int kColumns = kPanels * kVectors;
    const T* panel[kPanels];
    F acc[kRows][kColumns];
    unroll<kPanels>([&](auto p) ROPEWAY_LAMBDA { panel[p] = b[p]; });
    unroll<kRows * kColumns>([&](auto i) ROPEWAY_LAMBDA { acc[i / kColumns][i % kColumns] = out[i / kColumns][i % kColumns]; });
    for (int64_t i = 0; i < k; i += M::kStep) {
        beside(i);
        if constexpr (M::kDot) {
            typename V::Pair weights[kColumns];
            unroll<kColumns>([&](auto j) ROPEWAY_LAMBDA {
                weights[j] = V::load_pairs(panel[j / kVectors] + (j % kVectors) * V::kLanes * 2);
            });
            unroll<kRows>([&](auto m) ROPEWAY_LAMBDA {
                const typename V::Pair x = V::broadcast_pair(a + m * lda + i);
                unroll<kColumns>([&](auto j) ROPEWAY_LAMBDA { acc[m][j] = V::dot(acc[m][j], x, weights[j]); });
            });
        } else {
            unroll<M::kStep>([&](auto s) ROPEWAY_LAMBDA {
                const auto weight = [&](auto j) ROPEWAY_LAMBDA {
                    const T* from = panel[j / kVectors] + (j % kVectors) * V::kLanes * M::kStep;
                    if constexpr (M::kPaired)
                        return V::load_pair(from, s);
                    else
                        return V::load(from);
                };
                // The shorter side stays in registers, the longer one comes piece by piece.
                if constexpr (kRows < kColumns) {
                    F x[kRows];
                    unroll<kRows>([&](auto m) ROPEWAY_LAMBDA { x[m] = V::set(a[m * lda + i + s]); });
                    unroll<kColumns>([&](auto j) ROPEWAY_LAMBDA {
                        const F w = weight(j);
                        unroll<kRows>([&](auto m) ROPEWAY_LAMBDA { V::accumulate(acc[m][j], x[m], w); });
                    });
                } else {
                    F weights[kColumns];
                    unroll<kColumns>([&](auto j) ROPEWAY_LAMBDA { weights[j] = weight(j); });
                    unroll<kRows>([&](auto m) ROPEWAY_LAMBDA {
                        const F x = V::set(a[m * lda + i + s]);
                        unroll<kColumns>([&](auto j) ROPEWAY_LAMBDA { V::accumulate(acc[m][j], x, weights[j]); });
                    });
                }
            });
        }
        unroll<kPanels>([&](auto p) ROPEWAY_LAMBDA { panel[p] += ldb; });
    }
    unroll<kRows * kColumns>([&](auto i) ROPEWAY_LAMBDA { out[i / kColumns][i % kColumns] = acc[i / kColumns][i % kColumns]; });
}

}  // namespace
}  // namespace ropeway
