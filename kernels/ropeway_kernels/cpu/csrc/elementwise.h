// Norms, rotation with the write to the cache, gated activations, greatest values: all that is done row by row.
//
// Owns: their arithmetic and the order of their sums. Must not know: models, batches, instruction sets.
// Called by: the dispatch table of each instruction set.
//
// All arithmetic is in float32 and a result is rounded once, when it is stored. A row is computed by one thread in an
// order that depends on the row's size alone; so it is bitwise the same in any batch and with any number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "threads.h"
#include "tile.h"
#include "vec_math.h"

namespace ropeway {
namespace {

constexpr int64_t kGrain = 8192;  // simple operations on elements that are worth waking a thread for: about 5 us

// Calls body(begin, end) on pieces of [0, items). `cost`: of one item, in simple operations on elements. Little work
// stays on the calling thread, because handing it out takes as long.
template <class Body>
void parallel_ranges(int64_t items, int64_t cost, const Body& body) {
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cost));
    const int64_t pieces = std::min<int64_t>(std::max<int64_t>(1, items / grain), 4 * num_threads());
    parallel_for(pieces, [&](int64_t p) { body(items * p / pieces, items * (p + 1) / pieces); });
}

// A size is walked in whole vectors and, where it is no multiple of them, one part of a vector.
struct Whole {};
struct Part {
    int64_t count;
};

template <class V, class Body>
ROPEWAY_INLINE void for_vectors(int64_t size, const Body& body) {
    int64_t i = 0;
    for (; i + V::kLanes <= size; i += V::kLanes) body(i, Whole());
    if (i < size) body(i, Part{size - i});
}

template <class V, class T>
ROPEWAY_INLINE typename V::F load(const T* p, Whole) {
    return V::load(p);
}
template <class V, class T>
typename V::F load(const T* p, Part part) {  // zeros after the part
    T line[V::kLanes] = {};
    std::copy_n(p, part.count, line);
    return V::load(line);
}
template <class V, class T>
ROPEWAY_INLINE void store(T* p, typename V::F x, Whole) {
    V::store(p, x);
}
template <class V, class T>
void store(T* p, typename V::F x, Part part) {
    T line[V::kLanes];
    V::store(line, x);
    std::copy_n(line, part.count, p);
}

// Sum of x(i, width)^2 over [0, size). Four sums side by side, or each addition would wait for the last.
template <class V, class Load>
ROPEWAY_INLINE float sum_of_squares(int64_t size, const Load& x) {
    using F = typename V::F;
    F sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    int64_t i = 0;
    for (; i + 4 * V::kLanes <= size; i += 4 * V::kLanes) {
        unroll<4>([&](auto j) ROPEWAY_LAMBDA {
            const F value = x(i + j * V::kLanes, Whole());
            sums[j] = V::fma(value, value, sums[j]);
        });
    }
    for (; i < size; i += V::kLanes) {
        const F value = i + V::kLanes <= size ? x(i, Whole()) : x(i, Part{size - i});
        sums[0] = V::fma(value, value, sums[0]);
    }
    return V::sum(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
}

inline float inverse_rms(float sum_of_squares, int64_t size, float eps) {
    return 1.0f / std::sqrt(sum_of_squares / static_cast<float>(size) + eps);
}

// --- norm ---

// The residual stream is rounded to its type first, and the norm taken of what is then stored there.
template <class V, class T>
void norm_row(const T* x, T* residual, const float* weight, T* out, int64_t size, float eps) {
    using F = typename V::F;
    const T* from = residual != nullptr ? residual : x;
    const float squares =
        residual == nullptr
            ? sum_of_squares<V>(size, [&](int64_t i, auto width) ROPEWAY_LAMBDA { return load<V>(x + i, width); })
            : sum_of_squares<V>(size, [&](int64_t i, auto width) ROPEWAY_LAMBDA {
                  store<V>(residual + i, V::add(load<V>(residual + i, width), load<V>(x + i, width)), width);
                  return load<V>(residual + i, width);
              });
    const F scale = V::set(inverse_rms(squares, size, eps));
    for_vectors<V>(size, [&](int64_t i, auto width) ROPEWAY_LAMBDA {
        store<V>(out + i, V::mul(V::mul(load<V>(from + i, width), scale), load<V>(weight + i, width)), width);
    });
}

template <class V, class T>
void norm_rows(const void* x, void* residual, const float* weight, void* out, int64_t rows, int64_t size, float eps) {
    parallel_ranges(rows, size, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row)
            norm_row<V>(static_cast<const T*>(x) + row * size,
                        residual == nullptr ? nullptr : static_cast<T*>(residual) + row * size, weight,
                        static_cast<T*>(out) + row * size, size, eps);
    });
}

template <class V>
void rms_norm(const void* x, void* residual, const float* weight, void* out, Type type, int64_t rows, int64_t size,
              float eps) {
    switch (type) {
        case Type::kF32: return norm_rows<V, float>(x, residual, weight, out, rows, size, eps);
        case Type::kBf16: return norm_rows<V, bf16>(x, residual, weight, out, rows, size, eps);
        case Type::kF16: return norm_rows<V, f16>(x, residual, weight, out, rows, size, eps);
    }
}

// --- norm to int8 ---

// Returns the row's scale. The inverse root mean square is one factor for the whole row, so it is a factor of the scale,
// and the int8 values are those of x * weight: one sweep finds sum and greatest, a second one quantises what is still in
// the first-level cache.
template <class V, class T>
float norm_row_int8(const T* x, T* residual, const float* weight, int8_t* out, int64_t size, float eps) {
    using F = typename V::F;
    const T* from = residual != nullptr ? residual : x;
    F greatest = V::zero();
    const float squares = sum_of_squares<V>(size, [&](int64_t i, auto width) ROPEWAY_LAMBDA {
        if (residual != nullptr)
            store<V>(residual + i, V::add(load<V>(residual + i, width), load<V>(x + i, width)), width);
        const F value = load<V>(from + i, width);
        greatest = V::max(V::sign_of(V::mul(value, load<V>(weight + i, width)), V::zero()), greatest);
        return value;
    });
    float top = V::max_of(greatest);
    if (top < 128 * std::numeric_limits<float>::min()) top = 0.0f;  // steps of a 127th of it would be no normal numbers
    const float scale = top * inverse_rms(squares, size, eps) / 127.0f;
    if (!(scale > 0.0f && scale <= std::numeric_limits<float>::max())) {  // zeros, or there is an infinity or a NaN
        std::memset(out, 0, size);
        return scale;
    }
    const F steps = V::set(127.0f / top);
    for_vectors<V>(size, [&](int64_t i, auto width) ROPEWAY_LAMBDA {
        const F product = V::mul(load<V>(from + i, width), load<V>(weight + i, width));
        store<V>(out + i, V::mul(product, steps), width);
    });
    return scale;
}

template <class V, class T>
void norm_rows_int8(const void* x, void* residual, const float* weight, int8_t* out, float* scales, int64_t rows,
                    int64_t size, float eps) {
    parallel_ranges(rows, size, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row)
            scales[row] = norm_row_int8<V>(static_cast<const T*>(x) + row * size,
                                           residual == nullptr ? nullptr : static_cast<T*>(residual) + row * size,
                                           weight, out + row * size, size, eps);
    });
}

template <class V>
void rms_norm_int8(const void* x, void* residual, const float* weight, int8_t* out, float* scales, Type type,
                   int64_t rows, int64_t size, float eps) {
    switch (type) {
        case Type::kF32: return norm_rows_int8<V, float>(x, residual, weight, out, scales, rows, size, eps);
        case Type::kBf16: return norm_rows_int8<V, bf16>(x, residual, weight, out, scales, rows, size, eps);
        case Type::kF16: return norm_rows_int8<V, f16>(x, residual, weight, out, scales, rows, size, eps);
    }
}

// --- rotation and the write to the cache ---

// T: type of q, k and v; C: of the cache.
template <class V, class T, class C>
struct RopeKvKernel {
    using F = typename V::F;
    static constexpr int kStep = Mac<V, C>::kStep;

    const RopeKv& args;
    int64_t head_dim = args.head_dim;
    int64_t row = (args.num_heads + 2 * args.num_kv_heads) * head_dim;
    int64_t half = args.rotary_dim / 2;

    // One head's norm and rotation, from `head` to `line`.
    void turn(const T* head, const float* norm, int64_t token, float* line) const {
        float scale = 1.0f;
        if (norm != nullptr) {
            const float squares = sum_of_squares<V>(
                head_dim, [&](int64_t i, auto width) ROPEWAY_LAMBDA { return load<V>(head + i, width); });
            scale = inverse_rms(squares, head_dim, args.eps);
        }
        for (int64_t i = 0; i < head_dim; i += V::kLanes) {
            F x = V::load(head + i);
            if (norm != nullptr) x = V::mul(V::mul(x, V::set(scale)), V::load(norm + i));
            V::store(line + i, x);
        }
        const float* cos = args.cos + token * half;
        const float* sin = args.sin + token * half;
        for_vectors<V>(half, [&](int64_t i, auto width) ROPEWAY_LAMBDA {
            const F a = load<V>(line + i, width), b = load<V>(line + half + i, width);
            const F c = load<V>(cos + i, width), s = load<V>(sin + i, width);
            store<V>(line + i, V::sub(V::mul(a, c), V::mul(b, s)), width);
            store<V>(line + half + i, V::fma(b, c, V::mul(a, s)), width);
        });
    }

    template <class From, class To>
    void convert(const From* from, To* to) const {
        for (int64_t i = 0; i < head_dim; i += V::kLanes) V::store(to + i, V::load(from + i));
    }

    // The start of a (block, head) tile; heads of V follow those of K.
    C* tile_of(int64_t slot, int64_t head) const {
        return static_cast<C*>(args.kv) + slot / args.block_size * args.block_stride + head * args.block_size * head_dim;
    }

    // A pair along head_dim belongs to one position, so it is written at once.
    void write_k(const C* line, int64_t slot, int64_t kv_head) const {
        C* to = tile_of(slot, kv_head) + slot % args.block_size * kStep;
        for (int64_t d = 0; d < head_dim; d += kStep) std::memcpy(to + d * args.block_size, line + d, kStep * sizeof(C));
    }

    // A pair along positions is shared with the neighbour, which another thread may be writing: only our own half may
    // be touched. Attention reads both, so the half after a row's last position must at least be finite.
    void write_v(const C* line, int64_t slot, int64_t kv_head, bool last_of_row) const {
        const int64_t offset = slot % args.block_size;
        C* to = tile_of(slot, args.num_kv_heads + kv_head) + offset / kStep * kStep * head_dim + offset % kStep;
        for (int64_t d = 0; d < head_dim; ++d) to[d * kStep] = line[d];
        if (kStep == 2 && offset % 2 == 0 && last_of_row)
            for (int64_t d = 0; d < head_dim; ++d) to[d * kStep + 1] = C{};
    }

    // Head by head, so that the tile which consecutive tokens share stays in the first-level cache.
    void run(int64_t begin, int64_t end) const {
        static thread_local Scratch scratch;
        float* line = scratch.get<float>(2 * head_dim);
        C* rounded = reinterpret_cast<C*>(line + head_dim);
        T* qkv = static_cast<T*>(args.qkv);
        if (args.q_norm != nullptr || half > 0) {
            for (int64_t token = begin; token < end; ++token) {
                for (int64_t head = 0; head < args.num_heads; ++head) {
                    T* q = qkv + token * row + head * head_dim;
                    turn(q, args.q_norm, token, line);
                    convert(line, q);
                }
            }
        }
        for (int64_t head = 0; head < args.num_kv_heads; ++head) {
            const T* k = qkv + (args.num_heads + head) * head_dim;
            for (int64_t token = begin; token < end; ++token) {
                turn(k + token * row, args.k_norm, token, line);
                convert(line, rounded);
                write_k(rounded, args.slot_mapping[token], head);
            }
            const T* v = k + args.num_kv_heads * head_dim;
            for (int64_t token = begin; token < end; ++token) {
                const int64_t slot = args.slot_mapping[token];
                convert(v + token * row, rounded);
                write_v(rounded, slot, head, token + 1 == args.num_tokens || args.slot_mapping[token + 1] != slot + 1);
            }
        }
    }

    static void call(const RopeKv& args) {
        const RopeKvKernel kernel{args};
        constexpr int64_t kTokens = 64;  // whose tiles of one head are written before the next head's
        parallel_ranges(args.num_tokens, kernel.row, [&](int64_t begin, int64_t end) {
            for (int64_t token = begin; token < end; token += kTokens) kernel.run(token, std::min(end, token + kTokens));
        });
    }
};

template <class V, class T>
void rope_kv_into(const RopeKv& args) {
    switch (static_cast<Type>(args.kv_type)) {
        case Type::kF32: return RopeKvKernel<V, T, float>::call(args);
        case Type::kBf16: return RopeKvKernel<V, T, bf16>::call(args);
        case Type::kF16: return RopeKvKernel<V, T, f16>::call(args);
    }
}

template <class V>
void rope_kv(const RopeKv& args) {
    switch (static_cast<Type>(args.type)) {
        case Type::kF32: return rope_kv_into<V, float>(args);
        case Type::kBf16: return rope_kv_into<V, bf16>(args);
        case Type::kF16: return rope_kv_into<V, f16>(args);
    }
}

// --- gated activations ---

template <class V>
ROPEWAY_INLINE typename V::F sigmoid_times(typename V::F x, typename V::F argument) {  // x / (1 + e^-argument)
    return V::div(x, V::add(V::set(1.0f), exp<V>(V::sub(V::zero(), argument))));
}

template <class V, Gate kGate>
ROPEWAY_INLINE typename V::F gate(typename V::F x) {
    using F = typename V::F;
    if constexpr (kGate == Gate::kSilu) {
        return sigmoid_times<V>(x, x);
    } else if constexpr (kGate == Gate::kGeluTanh) {
        // (1 + tanh(u)) / 2 = 1 / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3), from arXiv 1606.08415
        const F cubic = V::fma(V::mul(x, x), V::set(0.0713548163f), V::set(1.5957691216f));
        return sigmoid_times<V>(x, V::mul(x, cubic));
    } else {
        // x times the normal distribution's Phi(x) = 1 - erfc(x / sqrt(2)) / 2. For z >= 0, with t = 1 / (1 + 0.3275911 z),
        // erfc(z) = (a1 t + ... + a5 t^5) e^-z^2 within 1.5e-7: Abramowitz and Stegun 7.1.26.
        const F z = V::mul(V::sign_of(x, V::zero()), V::set(0.7071067812f));
        const F t = V::div(V::set(1.0f), V::fma(z, V::set(0.3275911f), V::set(1.0f)));
        F p = V::fma(t, V::set(1.061405429f), V::set(-1.453152027f));
        p = V::fma(p, t, V::set(1.421413741f));
        p = V::fma(p, t, V::set(-0.284496736f));
        p = V::fma(p, t, V::set(0.254829592f));
        const F e = exp<V>(V::sub(V::zero(), V::mul(z, z)));
        const F beyond = V::mul(V::mul(V::mul(p, t), V::set(0.5f)), e);  // Phi(-|x|)
        return V::mul(x, V::select_less(x, V::zero(), beyond, V::sub(V::set(1.0f), beyond)));
    }
}

template <class V, class T, Gate kGate>
void gated_rows(const T* x, T* out, int64_t rows, int64_t size) {
    constexpr int64_t kColumns = 2048;  // a row that is longer may be shared
    const int64_t parts = (size + kColumns - 1) / kColumns;
    parallel_ranges(rows * parts, 2 * std::min(size, kColumns), [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
            const int64_t column = item % parts * kColumns;
            const T* first = x + item / parts * 2 * size + column;
            T* to = out + item / parts * size + column;
            for_vectors<V>(std::min(kColumns, size - column), [&](int64_t i, auto width) ROPEWAY_LAMBDA {
                store<V>(to + i, V::mul(gate<V, kGate>(load<V>(first + i, width)), load<V>(first + size + i, width)), width);
            });
        }
    });
}

template <class V, class T>
void gated_by(const void* x, void* out, int64_t rows, int64_t size, Gate kind) {
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    switch (kind) {
        case Gate::kSilu: return gated_rows<V, T, Gate::kSilu>(from, to, rows, size);
        case Gate::kGelu: return gated_rows<V, T, Gate::kGelu>(from, to, rows, size);
        case Gate::kGeluTanh: return gated_rows<V, T, Gate::kGeluTanh>(from, to, rows, size);
    }
}

template <class V>
void gated(const void* x, void* out, Type type, int64_t rows, int64_t size, Gate kind) {
    switch (type) {
        case Type::kF32: return gated_by<V, float>(x, out, rows, size, kind);
        case Type::kBf16: return gated_by<V, bf16>(x, out, rows, size, kind);
        case Type::kF16: return gated_by<V, f16>(x, out, rows, size, kind);
    }
}

// --- the greatest value ---

struct Greatest {
    float value;
    int64_t index;

    bool is_nan() const { return value != value; }
    // Whether it replaces what was found at smaller indices.
    bool beats(const Greatest& earlier) const { return value > earlier.value || (is_nan() && !earlier.is_nan()); }
};

// The greatest of x[0, size), its index only as the chunk it is in. A NaN is found by the sum, which keeps it; a sum of
// both infinities is NaN as well, so then the chunk is looked through.
template <class V>
Greatest greatest_chunk(const float* x, int64_t begin, int64_t size) {
    using F = typename V::F;
    F greatest[4], sums[4];
    unroll<4>([&](auto j) ROPEWAY_LAMBDA {
        greatest[j] = V::set(-std::numeric_limits<float>::infinity());
        sums[j] = V::zero();
    });
    int64_t i = 0;
    for (; i + 4 * V::kLanes <= size; i += 4 * V::kLanes) {
        unroll<4>([&](auto j) ROPEWAY_LAMBDA {
            const F value = V::load(x + begin + i + j * V::kLanes);
            greatest[j] = V::max(greatest[j], value);
            sums[j] = V::add(sums[j], value);
        });
    }
    float value = V::max_of(V::max(V::max(greatest[0], greatest[1]), V::max(greatest[2], greatest[3])));
    float sum = V::sum(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
    for (; i < size; ++i) {
        value = std::max(value, x[begin + i]);
        sum += x[begin + i];
    }
    if (sum != sum)
        for (int64_t n = 0; n < size; ++n)
            if (x[begin + n] != x[begin + n]) return {x[begin + n], begin};
    return {value, begin};
}

template <class V>
Greatest greatest_of(const float* x, int64_t begin, int64_t end) {
    constexpr int64_t kChunk = 2048;
    Greatest best = greatest_chunk<V>(x, begin, std::min(kChunk, end - begin));
    for (int64_t i = begin + kChunk; i < end; i += kChunk) {
        const Greatest next = greatest_chunk<V>(x, i, std::min(kChunk, end - i));
        if (next.beats(best)) best = next;
    }
    while (best.is_nan() ? x[best.index] == x[best.index] : x[best.index] != best.value) ++best.index;
    return {x[best.index], best.index};
}

template <class V>
void argmax(const float* x, int64_t rows, int64_t size, int64_t stride, float* value, int64_t* index) {
    static thread_local Scratch scratch;
    constexpr int64_t kColumns = 16384;  // a row that is longer may be shared
    const int64_t parts = (size + kColumns - 1) / kColumns;
    Greatest* found = scratch.get<Greatest>(rows * parts);
    parallel_ranges(rows * parts, std::min(size, kColumns) / 4, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
            const int64_t column = item % parts * kColumns;
            found[item] = greatest_of<V>(x + item / parts * stride, column, std::min(size, column + kColumns));
        }
    });
    for (int64_t row = 0; row < rows; ++row) {
        Greatest best = found[row * parts];
        for (int64_t part = 1; part < parts; ++part)
            if (found[row * parts + part].beats(best)) best = found[row * parts + part];
        value[row] = best.value;
        index[row] = best.index;
    }
}

}  // namespace
}  // namespace ropeway
