// What goes into a linear and what comes out: activations and results of any element type.
//
// Owns: conversion at the edges, the bias, the outputs past the last one. Must not know: blocking.
// Called by: linear.h.
#pragma once

#include <algorithm>

#include "tile.h"

namespace ropeway {
namespace {

struct LinearJob {
    const Linear& weights;
    const void* x;  // [rows, x_stride]
    Type x_type;
    int64_t x_stride;
    int64_t rows;
    void* y;  // [rows, y_stride]
    Type y_type;
    int64_t y_stride;
};

template <class V>
typename V::F load_as(const void* x, Type type, int64_t offset) {
    if (type == Type::kF32) return V::load(static_cast<const float*>(x) + offset);
    if (type == Type::kBf16) return V::load(static_cast<const bf16*>(x) + offset);
    return V::load(static_cast<const f16*>(x) + offset);
}

template <class V>
void store_as(void* y, Type type, int64_t offset, typename V::F value) {
    if (type == Type::kF32)
        V::store(static_cast<float*>(y) + offset, value);
    else if (type == Type::kBf16)
        V::store(static_cast<bf16*>(y) + offset, value);
    else
        V::store(static_cast<f16*>(y) + offset, value);
}

// take(i, vector) for the vectors at offset + i, 0 <= i < count; the last one is filled up with zeros.
template <class V, class Take>
void each_vector(const void* x, Type type, int64_t offset, int64_t count, const Take& take) {
    int64_t i = 0;
    for (; i + V::kLanes <= count; i += V::kLanes) take(i, load_as<V>(x, type, offset + i));
    if (i == count) return;
    char padded[V::kLanes * sizeof(float)] = {};
    std::copy_n(static_cast<const char*>(x) + (offset + i) * size_of(type), (count - i) * size_of(type), padded);
    take(i, load_as<V>(padded, type, 0));
}

// One row's sums of one panel, to y.
template <class V>
ROPEWAY_INLINE void finish_panel(const LinearJob& job, int64_t row, int64_t panel, const typename V::F* sums) {
    constexpr int kVectors = V::kPanelVectors, kPanel = kVectors * V::kLanes;
    const Linear& w = job.weights;
    const int64_t column = panel * kPanel;
    const int64_t offset = row * job.y_stride + column;
    if (column + kPanel <= w.out_features) {
        for (int v = 0; v < kVectors; ++v) {
            typename V::F sum = sums[v];
            if (w.bias != nullptr) sum = V::add(sum, V::load(w.bias + column + v * V::kLanes));
            store_as<V>(job.y, job.y_type, offset + v * V::kLanes, sum);
        }
        return;
    }
    // The last panel reaches past the last output.
    float line[kPanel];
    for (int v = 0; v < kVectors; ++v) V::store(line + v * V::kLanes, sums[v]);
    for (int64_t n = column; n < w.out_features; ++n) {
        float vector[V::kLanes] = {line[n - column] + (w.bias != nullptr ? w.bias[n] : 0.0f)};
        alignas(64) char lanes[V::kLanes * sizeof(float)];
        store_as<V>(lanes, job.y_type, 0, V::load(vector));
        std::copy_n(lanes, size_of(job.y_type), static_cast<char*>(job.y) + (offset + n - column) * size_of(job.y_type));
    }
}

}  // namespace
}  // namespace ropeway
