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

    // What a tile brings nearer meanwhile: one line of `from` in 2^shift of those it reads itself.
    struct Ahead {
        const T* from = nullptr;
        int shift = 0;
    };

    // One tile of some panels, k0 <= k < k1. Sums come from `partial` unless this is the first block of K, and go there
    // unless it is the last.
    struct Part {
        int64_t row, panel;
        int64_t k0, k1;
        const A* x;  // the first row's, from k0 on
        int64_t x_stride;
        float* partial;
        Ahead ahead;
    };

    template <int kRows, int kPanels>
    static void run(const LinearJob& job, const Part& part) {
        constexpr int kColumns = kPanels * kVectors, kStepSize = kPanel * M::kStep;
        const Linear& w = job.weights;
        const T* panels[kPanels];
        for (int p = 0; p < kPanels; ++p)
            panels[p] = static_cast<const T*>(w.packed) + ((part.panel + p) * w.in_features + part.k0) * kPanel;
        F acc[kRows][kColumns];
        for (int m = 0; m < kRows; ++m)
            for (int j = 0; j < kColumns; ++j)
                acc[m][j] = part.k0 == 0 ? V::zero() : V::load(part.partial + (m * kColumns + j) * V::kLanes);
        const auto multiply = [&](const auto& beside) ROPEWAY_LAMBDA {
            tile<V, T, kRows, kPanels, kVectors>(part.x, part.x_stride, panels, kStepSize, part.k1 - part.k0, acc, beside);
        };
        if (part.ahead.from != nullptr) {
            constexpr int kLine = 64 / sizeof(T);
            const T* line = part.ahead.from;
            const int64_t step = kStepSize >> part.ahead.shift;
            multiply([&](int64_t) ROPEWAY_LAMBDA {
                unroll<(kStepSize + kLine - 1) / kLine>(
                    [&](auto i) ROPEWAY_LAMBDA { __builtin_prefetch(line + i * kLine); });
                line += step;
            });
        } else {
            multiply(Nothing());
        }
        if (part.k1 < w.in_features) {
            for (int m = 0; m < kRows; ++m)
                for (int j = 0; j < kColumns; ++j) V::store(part.partial + (m * kColumns + j) * V::kLanes, acc[m][j]);
            return;
        }
        for (int m = 0; m < kRows; ++m)
            for (int p = 0; p < kPanels; ++p) finish_panel<V>(job, part.row + m, part.panel + p, acc[m] + p * kVectors);
    }

    using Run = void (*)(const LinearJob&, const Part&);

    // Few rows take several panels, so that enough chains of multiply-adds run side by side.
    static int panels_for(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

    static Run pick(int64_t rows, int panels) {
        if (panels == 4) return &run<1, 4>;
        if (panels == 2) return &run<2, 2>;
        return pick_rows(rows, std::make_integer_sequence<int, M::kRows>());
    }
    template <int... kLess>
    static Run pick_rows(int64_t rows, std::integer_sequence<int, kLess...>) {
        static constexpr Run table[] = {&run<kLess + 1, 1>...};
        return table[rows - 1];
    }

    // How rows and K are cut.
    struct Cut {
        int64_t rows, tiles, blocks, depth;

        Cut(int64_t rows, int64_t k) : rows(rows), tiles((rows + M::kRows - 1) / M::kRows) {
            const int64_t depths = (k + kDepth * 3 / 2 - 1) / (kDepth * 3 / 2);
            depth = ((k + depths - 1) / depths + 15) / 16 * 16;
            const int64_t tile_bytes = M::kRows * std::min(k, kDepth) * static_cast<int64_t>(sizeof(A));
            const int64_t most = std::max<int64_t>(1, kRowBlockBytes / tile_bytes);
            blocks = (tiles + most - 1) / most;
        }
        // The first tile of a block.
        int64_t tile(int64_t block) const { return tiles * block / blocks; }
        // The first row of a tile. They are of as equal height as can be: 32 rows are two of 6 and four of 5, not five of 6
        // and one of 2.
        int64_t row(int64_t tile) const { return rows * tile / tiles; }
    };

    // The activations as the units take them: the caller's own, or a copy in which each block of K lies together, because
    // rows a power of two apart share few places of a cache.
    struct Activations {
        const A* data;
        int64_t stride, block_stride, depth;
        const A* at(int64_t row, int64_t k) const { return data + k / depth * block_stride + row * stride; }
    };

    // The rows of one block, panels [panel0, panel1) of num_panels.
    static void block(const LinearJob& job, const Cut& cut, const Activations& x, int64_t index, int64_t panel0,
                      int64_t panel1, int64_t num_panels) {
        static thread_local Scratch scratch;
        const int64_t k = job.weights.in_features;
        const int64_t first = cut.tile(index), tiles = cut.tile(index + 1) - first;
        float* const sums =
            cut.depth >= k ? nullptr : scratch.get<float>((panel1 - panel0) * kPanel * tiles * M::kRows);
        const int width = panels_for(job.rows);
        const int spread = tiles > 4 ? 2 : tiles > 2 ? 1 : 0;
        for (int64_t k0 = 0; k0 < k; k0 += cut.depth) {
            const int64_t k1 = std::min(k, k0 + cut.depth);
            for (int64_t panel = panel0; panel < panel1;) {
                const int take = width <= panel1 - panel ? width : 1;
                // What is read next: this block of K of the next panel, the next block, or the next item.
                const bool turns = panel + take == panel1;
                const int64_t next_panel = turns && k1 < k ? panel0 : panel + take;
                const int64_t next_k = !turns ? k0 : k1 < k ? k1 : 0;
                const T* const next = static_cast<const T*>(job.weights.packed) + (next_panel * k + next_k) * kPanel;
                for (int64_t t = 0; t < tiles; ++t) {
                    const int64_t row = cut.row(first + t);
                    Part part{row, panel, k0, k1, x.at(row, k0), x.stride, nullptr, {}};
                    if (sums != nullptr)
                        part.partial = sums + ((panel - panel0) * tiles + t * take) * M::kRows * kPanel;
                    // From the second tile on the panel is in the first-level cache and the memory is free. Up to four
                    // tiles share the next panel, because one alone would have to wait for it.
                    if (t > 0 && t <= int64_t{1} << spread && next_panel < num_panels)
                        part.ahead = {next + ((k1 - k0) * kPanel >> spread) * (t - 1), spread};
                    pick(cut.row(first + t + 1) - row, take)(job, part);
                }
                panel += take;
            }
        }
    }

    static void call(const LinearJob& job) {
        static thread_local Scratch scratch;
        const int64_t k = job.weights.in_features, rows = job.rows;
        const int64_t num_panels = (job.weights.out_features + kPanel - 1) / kPanel;
        const Cut cut(rows, k);
        Activations x{static_cast<const A*>(job.x), job.x_stride, cut.depth, cut.depth};
        constexpr Type kA = std::is_same_v<A, float> ? Type::kF32 : Type::kBf16;
        if (job.x_type != kA) {
            A* const copy = scratch.get<A>((k + cut.depth - 1) / cut.depth * cut.depth * rows);
            x = {copy, cut.depth, cut.depth * rows, cut.depth};
            const int64_t chunk = std::max<int64_t>(1, 65536 / k);
            parallel_for((rows + chunk - 1) / chunk, [&](int64_t c) {
                for (int64_t m = c * chunk; m < std::min(rows, (c + 1) * chunk); ++m)
                    for (int64_t k0 = 0; k0 < k; k0 += cut.depth)
                        convert(job, m, k0, std::min(k - k0, cut.depth), copy + k0 * rows + m * cut.depth);
            });
        }
        const int64_t panel_bytes = k * kPanel * static_cast<int64_t>(sizeof(T));
        // Whole groups of the widest tile, at least four pieces per thread where there is so much.
        int64_t group = std::max<int64_t>(1, kItemBytes / panel_bytes);
        group = std::min(group, std::max<int64_t>(1, num_panels * cut.blocks / (4 * num_threads())));
        group = (group + panels_for(rows) - 1) / panels_for(rows) * panels_for(rows);
        parallel_shares(num_panels * cut.blocks, group, [&](int64_t begin, int64_t end) {
            while (begin < end) {
                const int64_t panel = begin % num_panels, stop = std::min(num_panels, panel + end - begin);
                block(job, cut, x, begin / num_panels, panel, stop, num_panels);
                begin += stop - panel;
            }
        });
    }

    static void convert(const LinearJob& job, int64_t row, int64_t k0, int64_t count, A* to) {
        each_vector<V>(job.x, job.x_type, row * job.x_stride + k0, count, [&](int64_t i, F vector) {
            if (i + V::kLanes <= count) return V::store(to + i, vector);
            A line[V::kLanes];
            V::store(line, vector);
            std::copy_n(line, count - i, to + i);
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
