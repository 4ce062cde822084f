// What this machine gives at best: the two figures that every other one is set against.
//
// Owns: the loops that do nothing but multiply or read. Called by: the dispatch table, for benchmarks only.
#pragma once

#include <chrono>

#include "threads.h"
#include "tile.h"

namespace ropeway {
namespace {

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Multiply-adds of bf16 pairs where the set has them, else of floats, all operands in registers, on all threads.
// Returns operations (two per multiply-add) per second.
template <class V>
double peak(int64_t iterations) {
    constexpr int kChains = 10;  // more than latency times units, and they fit the smallest register file
    const double began = seconds_now();
    parallel_for(num_threads(), [&](int64_t) {
        typename V::F acc[kChains];
        unroll<kChains>([&](auto i) ROPEWAY_LAMBDA { acc[i] = V::set(static_cast<float>(i)); });
        const typename V::F factor = V::set(0.999f), term = V::set(1e-3f);
        for (int64_t n = 0; n < iterations; ++n) {
            if constexpr (V::kDotBf16) {
                static const bf16 pair[2] = {{0x3f80}, {0x3f80}};
                const typename V::Pair x = V::broadcast_pair(pair);
                unroll<kChains>([&](auto i) ROPEWAY_LAMBDA { acc[i] = V::dot(acc[i], x, x); });
            } else {
                unroll<kChains>([&](auto i) ROPEWAY_LAMBDA { acc[i] = V::fma(acc[i], factor, term); });
            }
        }
        volatile float sink = 0;
        unroll<kChains>([&](auto i) ROPEWAY_LAMBDA { sink = sink + V::sum(acc[i]); });
    });
    const double operations = 2.0 * (V::kDotBf16 ? 2 : 1) * V::kLanes * kChains * iterations * num_threads();
    return operations / (seconds_now() - began);
}

// Reads `size` bytes once, in parts of 1 MB shared among all threads. Returns bytes per second.
template <class V>
double read_rate(const void* memory, int64_t size) {
    constexpr int64_t kPart = 1 << 20;
    const char* const bytes = static_cast<const char*>(memory);
    const double began = seconds_now();
    parallel_for(size / kPart, [&](int64_t part) {
        constexpr int kStreams = 8;
        const float* from = reinterpret_cast<const float*>(bytes + part * kPart);
        typename V::F acc[kStreams];
        unroll<kStreams>([&](auto i) ROPEWAY_LAMBDA { acc[i] = V::zero(); });
        for (int64_t k = 0; k < kPart / 4; k += kStreams * V::kLanes)
            unroll<kStreams>([&](auto i) ROPEWAY_LAMBDA { acc[i] = V::max(acc[i], V::load(from + k + i * V::kLanes)); });
        volatile float sink = 0;
        unroll<kStreams>([&](auto i) ROPEWAY_LAMBDA { sink = sink + V::max_of(acc[i]); });
    });
    return (size / kPart) * kPart / (seconds_now() - began);
}

}  // namespace
}  // namespace ropeway
