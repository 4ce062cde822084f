// y = x w' + bias over packed weights.
//
// Owns: blocking of the three loops, conversion of activations and results. Must not know: models, threads' number.
// Called by: the dispatch table of each instruction set.
//
// Rows are cut into blocks whose activations stay in the second-level cache, K into blocks so that a strip of weights
// does too; the sums wait in memory between two K blocks and go on in the same order. Few rows take several panels at a
// time, because one chain of multiply-adds per vector does not keep the units busy.
#pragma once

#include <algorithm>
#include <utility>

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

    struct Job {
        const Linear* linear;
        const A* x;
        int64_t x_stride;
        int64_t rows;
        void* y;
        Type y_type;
        int64_t y_stride;
        int64_t num_panels;
    };

    // One tile, k0 <= k < k1. Sums come from and go to `partial` unless this is the first or last block of K. is_ahead:
    // bring the next panel nearer meanwhile.
    template <int kRows, int kPanels>
    static void run(const Job& job, int64_t row, int64_t first_panel, int64_t k0, int64_t k1, float* partial,
                    bool is_ahead) {
        const Linear& w = *job.linear;
        const T* packed = static_cast<const T*>(w.packed);
        const T* panels[kPanels];
        for (int p = 0; p < kPanels; ++p)
            panels[p] = packed + (first_panel + p) * w.in_features * kPanel + k0 * kPanel;
        F acc[kRows][kPanels * kVectors];
        for (int m = 0; m < kRows; ++m)
            for (int j = 0; j < kPanels * kVectors; ++j)
                acc[m][j] = k0 == 0 ? V::zero() : V::load(partial + (m * kPanels * kVectors + j) * V::kLanes);
        const A* x = job.x + row * job.x_stride + k0;
        if (is_ahead) {
            constexpr int kLine = 64 / sizeof(T), kStepSize = kPanel * M::kStep;
            const T* const ahead = panels[kPanels - 1] + w.in_features * kPanel;
            const auto fetch = [&](int64_t i) ROPEWAY_LAMBDA {
                unroll<(kStepSize + kLine - 1) / kLine>(
                    [&](auto line) ROPEWAY_LAMBDA { __builtin_prefetch(ahead + i * kPanel + line * kLine); });
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
            for (int p = 0; p < kPanels; ++p)
                finish(job, row + m, (first_panel + p) * kPanel, acc[m] + p * kVectors);
    }

    static void finish(const Job& job, int64_t row, int64_t column, const F* sums) {
        const Linear& w = *job.linear;
        const int64_t offset = row * job.y_stride + column;
        if (column + kPanel <= w.out_features) {
            for (int v = 0; v < kVectors; ++v) {
                F sum = sums[v];
                if (w.bias != nullptr) sum = V::add(sum, V::load(w.bias + column + v * V::kLanes));
                store_as(job.y, job.y_type, offset + v * V::kLanes, sum);
            }
            return;
        }
        // The last panel reaches past the last output.
        float line[kPanel];
        for (int v = 0; v < kVectors; ++v) V::store(line + v * V::kLanes, sums[v]);
        for (int64_t n = column; n < w.out_features; ++n) {
            float vector[V::kLanes] = {line[n - column] + (w.bias != nullptr ? w.bias[n] : 0.0f)};
            const F sum = V::load(vector);
            alignas(64) char lanes[V::kLanes * sizeof(float)];
            store_as(lanes, job.y_type, 0, sum);
            const size_t size = job.y_type == Type::kF32 ? 4 : 2;
            std::copy_n(lanes, size, static_cast<char*>(job.y) + (offset + n - column) * size);
        }
    }

    static void store_as(void* y, Type type, int64_t offset, F value) {
        if (type == Type::kF32)
            V::store(static_cast<float*>(y) + offset, value);
        else if (type == Type::kBf16)
            V::store(static_cast<bf16*>(y) + offset, value);
        else
            V::store(static_cast<f16*>(y) + offset, value);
    }

    using Run = void (*)(const Job&, int64_t, int64_t, int64_t, int64_t, float*, bool);

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
    static void block(const Job& job, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
        static thread_local Scratch scratch;
        const int64_t k = job.linear->in_features;
        const int64_t tiles = (row1 - row0 + M::kRows - 1) / M::kRows;
        const int64_t depths = (k + kDepth * 3 / 2 - 1) / (kDepth * 3 / 2);
        const int64_t depth = ((k + depths - 1) / depths + 15) / 16 * 16;
        float* partial =
            depths == 1 ? nullptr : scratch.get<float>((panel1 - panel0) * kPanel * tiles * M::kRows);
        const int width = panels_for(row1 - row0);
        for (int64_t k0 = 0; k0 < k; k0 += depth) {
            const int64_t k1 = std::min(k, k0 + depth);
            for (int64_t panel = panel0; panel < panel1;) {
                const int take = width <= panel1 - panel ? width : 1;
                for (int64_t t = 0; t < tiles; ++t) {
                    // Tiles of as equal height as can be: 32 rows are 6 6 5 5 5 5, not 6 6 6 6 6 2.
                    const int64_t begin = row0 + (row1 - row0) * t / tiles, end = row0 + (row1 - row0) * (t + 1) / tiles;
                    float* sums = partial == nullptr ? nullptr
                                                     : partial + ((panel - panel0) * tiles + t * take) * M::kRows * kPanel;
                    // The second tile finds its panel in the first-level cache and has the memory for itself.
                    const bool is_ahead = t == 1 && panel + take < panel1;
                    pick(static_cast<int>(end - begin), take)(job, begin, panel, k0, k1, sums, is_ahead);
                }
                panel += take;
            }
        }
    }

    static void call(const Linear& w, const void* x, Type x_type, int64_t rows, int64_t x_stride, void* y, Type y_type,
                     int64_t y_stride) {
        static thread_local Scratch scratch;
        const int64_t k = w.in_features;
        Job job{&w, nullptr, x_stride, rows, y, y_type, y_stride, (w.out_features + kPanel - 1) / kPanel};
        if ((x_type == Type::kF32 && std::is_same_v<A, float>) || (x_type == Type::kBf16 && std::is_same_v<A, bf16>)) {
            job.x = static_cast<const A*>(x);
        } else {
            A* wide = scratch.get<A>(rows * k);
            const int64_t chunk = std::max<int64_t>(1, 65536 / k);
            parallel_for((rows + chunk - 1) / chunk, [&](int64_t c) {
                for (int64_t m = c * chunk; m < std::min(rows, (c + 1) * chunk); ++m) convert(x, x_type, m * x_stride, wide + m * k, k);
            });
            job.x = wide;
            job.x_stride = k;
        }
        int64_t block_rows = std::max<int64_t>(kRowBlockBytes / static_cast<int64_t>(sizeof(A)) / std::min(k, kDepth), M::kRows);
        const int64_t row_blocks = (rows + block_rows - 1) / block_rows;
        const int64_t panel_bytes = k * kPanel * static_cast<int64_t>(sizeof(T));
        // Whole groups of the widest tile, at least four items per thread where there is so much.
        int64_t group = std::max<int64_t>(1, kItemBytes / panel_bytes);
        group = std::min(group, std::max<int64_t>(1, job.num_panels * row_blocks / (4 * num_threads())));
        group = (group + 3) / 4 * 4;
        const int64_t groups = (job.num_panels + group - 1) / group;
        parallel_for(row_blocks * groups, [&](int64_t item) {
            const int64_t b = item / groups, g = item % groups;
            block(job, rows * b / row_blocks, rows * (b + 1) / row_blocks, g * group, std::min(job.num_panels, (g + 1) * group));
        });
    }

    static void convert(const void* x, Type type, int64_t offset, A* to, int64_t count) {
        for (int64_t i = 0; i < count; i += V::kLanes) {
            if (i + V::kLanes > count) {  // the tail, one by one through a padded line
                char from[V::kLanes * sizeof(float)] = {};
                const size_t size = type == Type::kF32 ? 4 : 2;
                std::copy_n(static_cast<const char*>(x) + (offset + i) * size, (count - i) * size, from);
                A line[V::kLanes];
                V::store(line, load_as(from, type, 0));
                std::copy_n(line, count - i, to + i);
                return;
            }
            V::store(to + i, load_as(x, type, offset + i));
        }
    }
    static F load_as(const void* x, Type type, int64_t offset) {
        if (type == Type::kF32) return V::load(static_cast<const float*>(x) + offset);
        if (type == Type::kBf16) return V::load(static_cast<const bf16*>(x) + offset);
        return V::load(static_cast<const f16*>(x) + offset);
    }
};

template <class V>
void linear(const Linear& w, const void* x, Type x_type, int64_t rows, int64_t x_stride, void* y, Type y_type,
            int64_t y_stride) {
    switch (static_cast<Type>(w.type)) {
        case Type::kF32: return LinearKernel<V, float>::call(w, x, x_type, rows, x_stride, y, y_type, y_stride);
        case Type::kBf16: return LinearKernel<V, bf16>::call(w, x, x_type, rows, x_stride, y, y_type, y_stride);
        case Type::kF16: return LinearKernel<V, f16>::call(w, x, x_type, rows, x_stride, y, y_type, y_stride);
    }
}

}  // namespace
}  // namespace ropeway
