// y = x w' + bias over packed weights.
//
// Owns: blocking of the three loops, and which panels a thread takes. Must not know: models, threads' number.
// Called by: the dispatch table of each instruction set.
//
// Rows are cut into blocks whose activations stay in the second-level cache, K into blocks so that a strip of weights
// does too; the sums wait in memory between two K blocks and go on in the same order. Few rows take several panels at a
// time, because one chain of multiply-adds per vector does not keep the units busy.
#pragma once

#include <algorithm>
#include <utility>

#include "linear_io.h"
#include "threads.h"
#include "tile.h"

namespace ropeway {
namespace {

constexpr int64_t kRowBlockBytes = 192 << 10;
constexpr int64_t kDepth = 1024;  // K elements of a block, about
constexpr int64_t kItemBytes = 128 << 10;  // of weights that a thread takes at a time; small enough to balance

template <class V, class T>
struct LinearKernel {
    using F = typename V::F;
    using M = Mac<V, T>;
    using A = typename M::A;
    static constexpr int kVectors = V::kPanelVectors;
    static constexpr int kPanel = kVectors * V::kLanes;

    // What a tile brings nearer meanwhile: one line of `from` in 2^shift steps along K.
    struct Ahead {
        const T* from = nullptr;
        int shift = 0;
    };

    // One tile, k0 <= k < k1. Sums come from and go to `partial` unless this is the first or last block of K.
    template <int kRows, int kPanels>
    static void run(const LinearJob& job, int64_t row, int64_t first_panel, int64_t k0, int64_t k1, float* partial,
                    Ahead ahead) {
        const Linear& w = job.weights;
        const T* packed = static_cast<const T*>(w.packed);
        const T* panels[kPanels];
        for (int p = 0; p < kPanels; ++p)
            panels[p] = packed + (first_panel + p) * w.in_features * kPanel + k0 * kPanel;
        F acc[kRows][kPanels * kVectors];
        for (int m = 0; m < kRows; ++m)
            for (int j = 0; j < kPanels * kVectors; ++j)
                acc[m][j] = k0 == 0 ? V::zero() : V::load(partial + (m * kPanels * kVectors + j) * V::kLanes);
        const A* const x = static_cast<const A*>(job.x) + row * job.x_stride + k0;
        if (ahead.from != nullptr) {
            constexpr int kLine = 64 / sizeof(T), kStepSize = kPanel * M::kStep;
            const auto fetch = [&](int64_t i) ROPEWAY_LAMBDA {
                unroll<(kStepSize + kLine - 1) / kLine>([&](auto line) ROPEWAY_LAMBDA {
                    __builtin_prefetch(ahead.from + ((i * kPanel) >> ahead.shift) + line * kLine);
                });
            };
            tile<V, T, kRows, kPanels, kVectors>(x, job.x_stride, panels, kPanel * M::kStep, k1 - k0, acc, fetch);
        } else {
            tile<V, T, kRows, kPanels, kVectors>(x, job.x_stride, panels, kPanel * M::kStep, k1 - k0, acc);
        }
        if (k1 < w.in_features) {
            for (int m = 0; m < kRows; ++m)
                for (int j = 0; j < kPanels * kVectors; ++j)
                    V::store(partial + (m * kPanels * kVectors + j) * V::kLanes, acc[m][j]);
            return;
        }
        for (int m = 0; m < kRows; ++m)
            for (int p = 0; p < kPanels; ++p) finish_panel<V>(job, row + m, first_panel + p, acc[m] + p * kVectors);
    }

    using Run = void (*)(const LinearJob&, int64_t, int64_t, int64_t, int64_t, float*, Ahead);

    // Few rows take several panels, so that enough chains of multiply-adds run side by side.
    static int panels_for(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

    static Run pick(int rows, int panels) {
        if (panels == 4) return &run<1, 4>;
        if (panels == 2) return &run<2, 2>;
        return pick_rows(rows, std::make_integer_sequence<int, M::kRows>());
    }
    template <int... kLess>
    static Run pick_rows(int rows, std::integer_sequence<int, kLess...>) {
        static constexpr Run table[] = {&run<kLess + 1, 1>...};
        return table[rows - 1];
    }

    // All rows [row0, row1) of panels [panel0, panel1).
    static void block(const LinearJob& job, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1, bool is_last) {
        static thread_local Scratch scratch;
        const int64_t k = job.weights.in_features;
        const int64_t tiles = (row1 - row0 + M::kRows - 1) / M::kRows;
        const int64_t depths = (k + kDepth * 3 / 2 - 1) / (kDepth * 3 / 2);
        const int64_t depth = ((k + depths - 1) / depths + 15) / 16 * 16;
        float* partial =
            depths == 1 ? nullptr : scratch.get<float>((panel1 - panel0) * kPanel * tiles * M::kRows);
        const int width = panels_for(row1 - row0);
        const int spread = tiles > 4 ? 2 : tiles > 2 ? 1 : 0;
        for (int64_t k0 = 0; k0 < k; k0 += depth) {
            const int64_t k1 = std::min(k, k0 + depth);
            for (int64_t panel = panel0; panel < panel1;) {
                const int take = width <= panel1 - panel ? width : 1;
                for (int64_t t = 0; t < tiles; ++t) {
                    // Tiles of as equal height as can be: 32 rows are 6 6 5 5 5 5, not 6 6 6 6 6 2.
                    const int64_t begin = row0 + (row1 - row0) * t / tiles, end = row0 + (row1 - row0) * (t + 1) / tiles;
                    float* sums = partial == nullptr ? nullptr
                                                     : partial + ((panel - panel0) * tiles + t * take) * M::kRows * kPanel;
                    // From the second tile on the panel is in the first-level cache and the memory is free. Up to four
                    // tiles share the next panel, because one alone would have to wait for it.
                    Ahead ahead;
                    if (t > 0 && t <= int64_t{1} << spread && (panel + take < panel1 || !is_last)) {
                        const int64_t part = ((k1 - k0) * kPanel >> spread) * (t - 1);
                        ahead = {static_cast<const T*>(job.weights.packed) + ((panel + take) * k + k0) * kPanel + part, spread};
                    }
                    pick(static_cast<int>(end - begin), take)(job, begin, panel, k0, k1, sums, ahead);
                }
                panel += take;
            }
        }
    }

    static void call(LinearJob job) {
        static thread_local Scratch scratch;
        const int64_t k = job.weights.in_features, rows = job.rows;
        const int64_t num_panels = (job.weights.out_features + kPanel - 1) / kPanel;
        constexpr Type kA = std::is_same_v<A, float> ? Type::kF32 : Type::kBf16;
        if (job.x_type != kA) {
            A* wide = scratch.get<A>(rows * k);
            const int64_t chunk = std::max<int64_t>(1, 65536 / k);
            parallel_for((rows + chunk - 1) / chunk, [&](int64_t c) {
                for (int64_t m = c * chunk; m < std::min(rows, (c + 1) * chunk); ++m) convert(job, m, wide + m * k);
            });
            job.x = wide;
            job.x_type = kA;
            job.x_stride = k;
        }
        const int64_t block_rows =
            std::max<int64_t>(kRowBlockBytes / static_cast<int64_t>(sizeof(A)) / std::min(k, kDepth), M::kRows);
        const int64_t row_blocks = (rows + block_rows - 1) / block_rows;
        const int64_t panel_bytes = k * kPanel * static_cast<int64_t>(sizeof(T));
        // Whole groups of the widest tile, at least four pieces per thread where there is so much.
        int64_t group = std::max<int64_t>(1, kItemBytes / panel_bytes);
        group = std::min(group, std::max<int64_t>(1, num_panels * row_blocks / (4 * num_threads())));
        group = (group + panels_for(rows) - 1) / panels_for(rows) * panels_for(rows);
        parallel_shares(num_panels * row_blocks, group, [&](int64_t begin, int64_t end) {
            while (begin < end) {
                const int64_t b = begin / num_panels, panel = begin % num_panels;
                const int64_t stop = std::min(num_panels, panel + end - begin);
                block(job, rows * b / row_blocks, rows * (b + 1) / row_blocks, panel, stop, stop == num_panels);
                begin += stop - panel;
            }
        });
    }

    static void convert(const LinearJob& job, int64_t row, A* to) {
        const int64_t k = job.weights.in_features;
        each_vector<V>(job.x, job.x_type, row * job.x_stride, k, [&](int64_t i, F vector) {
            if (i + V::kLanes <= k) return V::store(to + i, vector);
            A line[V::kLanes];
            V::store(line, vector);
            std::copy_n(line, k - i, to + i);
        });
    }
};

template <class V>
void linear(const Linear& w, const void* x, Type x_type, int64_t rows, int64_t x_stride, void* y, Type y_type,
            int64_t y_stride) {
    const LinearJob job{w, x, x_type, x_stride, rows, y, y_type, y_stride};
    switch (static_cast<Type>(w.type)) {
        case Type::kF32: return LinearKernel<V, float>::call(job);
        case Type::kBf16: return LinearKernel<V, bf16>::call(job);
        case Type::kF16: return LinearKernel<V, f16>::call(job);
    }
}

}  // namespace
}  // namespace ropeway
