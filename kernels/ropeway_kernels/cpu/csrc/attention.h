// Attention of a ragged batch, straight from the block table.
//
// Owns: the layout of a KV tile, the order of every sum, how the work is shared out. Must not know: models, requests,
// how the cache is written (elementwise.h does that). Called by: the dispatch table of each instruction set.
//
// A block of one layer holds a K tile, then a V tile for each KV head. Both are what tile.h reads as packed weights,
//   K  [head_dim / step][block_size][step]    columns are positions:  scores = q . K
//   V  [block_size / step][head_dim][step]    columns are dimensions: out = weights . V
// where `step` is 2 for bf16 (a pair shares 32 bits) and 1 for the others.
//
// The rows of a tile are (query, head) pairs that share a KV head. Positions are taken in spans of kSpan at absolute
// positions. Within a span a row's scores get their exact maximum, their exponentials are summed by lane, and the
// weighted sum of V is one chain over the positions; then the span is merged into what the earlier ones gave. Nothing
// of this depends on which rows are computed together or by whom: an item of work that has only some of a tile's spans
// leaves each in memory by itself, and the last to finish merges them in the same order as one that had them all.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "threads.h"
#include "tile.h"
#include "vec_math.h"

namespace ropeway {
namespace {

constexpr int64_t kSpan = 256;  // positions; another value gives other answers in the last bit
constexpr int64_t kQueryTileBytes = 64 << 10;  // of q and its sums; beside a span of K and V in the second-level cache
constexpr int64_t kItemsPerThread = 8;
constexpr int64_t kPiece = 16;       // dimensions between two rounds of prefetches
constexpr int64_t kChunk = 32;       // positions whose V is read by all columns before the next; prefetches' distance
constexpr int64_t kCacheLine = 64;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

template <class V, class T>
struct AttentionKernel {
    using F = typename V::F;
    using M = Mac<V, T>;
    using A = typename M::A;
    static constexpr int64_t kLanes = V::kLanes;
    // Register tiles are an even number of vectors wide, as a span and most heads are, or a narrow rest would be left,
    // and an even number of rows high, as of five GCC keeps one sum in memory. Few rows take more vectors, so that
    // enough chains of multiply-adds run side by side.
    static constexpr int kWidth = V::kPanelVectors + V::kPanelVectors % 2;
    static constexpr int kHeight = M::kRows * V::kPanelVectors / kWidth / 2 * 2;
    static constexpr int width(int rows) { return std::max(kWidth, (8 + rows - 1) / rows); }
    static constexpr int64_t kLine = kSpan + 8 * kLanes;  // scores of a row; the last tile may reach past the span

    // Consecutive queries of one request.
    struct QueryTile {
        int64_t request;
        int64_t first_token;  // in the step
        int64_t num_queries;
        int64_t first_position;
        int64_t first_span, end_span;
        int64_t partial;  // where in `partials` its spans are left; -1: each item has all of them
        int64_t counter;
    };
    struct Item {  // times num_kv_heads
        int64_t tile;
        int64_t first_span, end_span;
    };

    // Softmax so far of some rows: the weighted sum of V, and the maximum and the sum of exponentials of the scores.
    struct State {
        float* sums;  // [rows, head_dim]
        float* peak;  // [rows]
        float* total;

        State(float* memory, int64_t rows, int64_t head_dim)
            : sums(memory), peak(memory + rows * head_dim), total(peak + rows) {}
        static int64_t size(int64_t rows, int64_t head_dim) { return rows * (head_dim + 2); }
        void clear(int64_t rows, int64_t head_dim) {
            std::fill_n(sums, rows * head_dim, 0.0f);
            std::fill_n(peak, rows, kMinusInfinity);
            std::fill_n(total, rows, 0.0f);
        }
    };

    // Where K and V of a span's positions are, for each vector of them; null where a tile sees none.
    struct Span {
        int64_t begin;  // absolute position
        const T* keys[kSpan / kLanes + 8];
        const T* values[kSpan / kLanes];
    };

    // What to prefetch beside the work on a span; null: nothing. A span's first row tile brings in what it will need
    // kChunk positions later itself, up to the start of the next span; the second one, if there is one, brings in the
    // whole of the next, as it finds its own data in the second-level cache.
    struct Fetch {
        const Span* near;
        const Span* far;
    };

    // What a thread works in.
    struct Workspace {
        const A* q;  // [rows, head_dim]
        Span spans[2];  // this one and the next
        float* sums;    // [kHeight, head_dim]
        float scores[kHeight * kLine];
        A weights[std::is_same_v<A, float> ? 1 : kHeight * kLine];  // floats take the place of the scores
    };

    const Attention& a;
    const int64_t head_dim = a.head_dim;
    const int64_t block_size = a.block_size;
    const int64_t group = a.num_heads / a.num_kv_heads;
    const float score_scale = a.soft_cap > 0.0f ? a.scale / a.soft_cap : a.scale;
    QueryTile* tiles = nullptr;
    Item* items = nullptr;
    int64_t num_items = 0;
    float* partials = nullptr;
    std::atomic<int32_t>* counters = nullptr;  // per tile that is shared out and KV head: spans that are done

    // --- the work, and how it is shared out ---

    void run() {
        plan();
        parallel_for(num_items * a.num_kv_heads, [&](int64_t i) {
            attend(items[i / a.num_kv_heads], i % a.num_kv_heads);
        });
    }

    int64_t row_tiles(int64_t queries) const { return (queries * group + kHeight - 1) / kHeight; }

    void plan() {
        static thread_local Scratch tile_memory, item_memory, partial_memory, counter_memory;
        const int64_t num_tokens = a.query_start_loc[a.num_reqs], shares = kItemsPerThread * num_threads();
        const int64_t row_bytes = head_dim * static_cast<int64_t>(sizeof(A) + sizeof(float));
        const int64_t fair_rows = std::max<int64_t>(4 * kHeight, num_tokens * a.num_heads / shares);
        const int64_t tile_rows = std::min(kQueryTileBytes / row_bytes, fair_rows);
        const int64_t tile_queries = std::max<int64_t>(1, tile_rows / group);

        tiles = tile_memory.get<QueryTile>(num_tokens);
        int64_t num_tiles = 0, cost = 0, most_items = 0;
        for (int64_t request = 0; request < a.num_reqs; ++request) {
            const int64_t start = a.query_start_loc[request], queries = a.query_start_loc[request + 1] - start;
            const int64_t parts = (queries + tile_queries - 1) / tile_queries;
            for (int64_t part = parts - 1; part >= 0; --part) {  // the longest work first
                const int64_t from = queries * part / parts, to = queries * (part + 1) / parts;
                const int64_t position = a.seq_lens[request] - queries + from;
                const int64_t oldest = a.sliding_window > 0 ? std::max<int64_t>(0, position + 1 - a.sliding_window) : 0;
                QueryTile& tile = tiles[num_tiles++] = {request, start + from, to - from, position, oldest / kSpan,
                                                        (position + to - from + kSpan - 1) / kSpan, -1, 0};
                most_items += tile.end_span - tile.first_span;
                cost += (tile.end_span - tile.first_span) * row_tiles(tile.num_queries);
            }
        }

        items = item_memory.get<Item>(most_items);
        num_items = 0;
        const int64_t share = std::max<int64_t>(1, cost * a.num_kv_heads / shares);
        int64_t num_partials = 0, num_counters = 0;
        for (int64_t t = 0; t < num_tiles; ++t) {
            QueryTile& tile = tiles[t];
            const int64_t spans = tile.end_span - tile.first_span;
            const int64_t most = std::max<int64_t>(1, share / row_tiles(tile.num_queries));
            const int64_t parts = num_threads() > 1 ? (spans + most - 1) / most : 1;
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t from = spans * part / parts, to = spans * (part + 1) / parts;
                items[num_items++] = {t, tile.first_span + from, tile.first_span + to};
            }
            if (parts > 1) {
                tile.partial = num_partials;
                tile.counter = num_counters;
                num_partials += spans * a.num_kv_heads * State::size(tile.num_queries * group, head_dim);
                num_counters += a.num_kv_heads;
            }
        }
        partials = partial_memory.get<float>(num_partials);
        counters = counter_memory.get<std::atomic<int32_t>>(num_counters);
        for (int64_t i = 0; i < num_counters; ++i) counters[i].store(0, std::memory_order_relaxed);
    }

    State partial(const QueryTile& tile, int64_t kv_head, int64_t span) const {
        const int64_t rows = tile.num_queries * group, spans = tile.end_span - tile.first_span;
        const int64_t index = kv_head * spans + span - tile.first_span;
        return State(partials + tile.partial + index * State::size(rows, head_dim), rows, head_dim);
    }

    void attend(const Item& item, int64_t kv_head) const {
        static thread_local Scratch query_memory, state_memory, sums_memory;
        static thread_local Workspace work;
        const QueryTile& tile = tiles[item.tile];
        const int64_t rows = tile.num_queries * group;
        A* q = query_memory.get<A>(rows * head_dim);
        load_queries(tile, kv_head, q);
        work.q = q;
        work.sums = sums_memory.get<float>(kHeight * head_dim);
        State state(state_memory.get<float>(State::size(rows, head_dim)), rows, head_dim);
        if (tile.partial < 0) {
            state.clear(rows, head_dim);
            for_spans(item, tile, kv_head, work, [&](int64_t) { return state; });
            store_result(tile, kv_head, state);
            return;
        }
        for_spans(item, tile, kv_head, work, [&](int64_t s) {
            State alone = partial(tile, kv_head, s);
            alone.clear(rows, head_dim);
            return alone;
        });
        const auto done = static_cast<int32_t>(item.end_span - item.first_span);
        const int32_t before = counters[tile.counter + kv_head].fetch_add(done, std::memory_order_acq_rel);
        if (before + done < tile.end_span - tile.first_span) return;
        state.clear(rows, head_dim);
        for (int64_t s = tile.first_span; s < tile.end_span; ++s) {
            const State alone = partial(tile, kv_head, s);
            for (int64_t row = 0; row < rows; ++row) {
                if (alone.peak[row] == kMinusInfinity) continue;
                Factors factors;
                merge<1>(state, row, alone.peak + row, alone.total + row, &factors);
                float* sums = state.sums + row * head_dim;
                for (int64_t i = 0; i < head_dim; i += kLanes)
                    V::store(sums + i, factors.merge(sums + i, V::load(alone.sums + row * head_dim + i)));
            }
        }
        store_result(tile, kv_head, state);
    }

    // --- one span ---

    // How a row's sums before a span and those of the span itself are to be scaled to be added.
    struct Factors {
        float before = 1.0f, now = 0.0f;
        F merge(const float* sums, F more) const {
            return V::fma(more, V::set(now), V::mul(V::load(sums), V::set(before)));
        }
    };
    // Takes the maxima and sums of a span into the state of kRows rows. Those that saw nothing of it have a peak of
    // -infinity and stay as they are.
    template <int kRows>
    static void merge(State& state, int64_t row, const float* peak, const float* total, Factors* factors) {
        constexpr int64_t kPadded = (2 * kRows + kLanes - 1) / kLanes * kLanes;
        float lanes[kPadded] = {};
        for (int m = 0; m < kRows; ++m) {
            const float before = state.peak[row + m], both = std::max(before, peak[m]);
            if (peak[m] == kMinusInfinity) continue;
            lanes[2 * m] = before - both;
            lanes[2 * m + 1] = peak[m] - both;
            state.peak[row + m] = both;
        }
        for (int64_t i = 0; i < kPadded; i += kLanes) V::store(lanes + i, exp<V>(V::load(lanes + i)));
        for (int m = 0; m < kRows; ++m) {
            if (peak[m] == kMinusInfinity) continue;
            factors[m] = {lanes[2 * m], lanes[2 * m + 1]};
            state.total[row + m] = std::fma(total[m], factors[m].now, state.total[row + m] * factors[m].before);
        }
    }

    template <class StateOf>
    void for_spans(const Item& item, const QueryTile& tile, int64_t kv_head, Workspace& work,
                   const StateOf& state_of) const {
        const int64_t rows = tile.num_queries * group, parts = row_tiles(tile.num_queries);
        find(tile, kv_head, item.first_span, work.spans[item.first_span % 2]);
        for (int64_t s = item.first_span; s < item.end_span; ++s) {
            const Span& span = work.spans[s % 2];
            Span& next = work.spans[(s + 1) % 2];
            if (s + 1 < item.end_span)
                find(tile, kv_head, s + 1, next);
            else
                std::fill_n(next.values, kSpan / kLanes, nullptr);
            State state = state_of(s);
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t from = rows * part / parts, to = rows * (part + 1) / parts;
                const Fetch fetch{part == 0 ? &next : nullptr, part == 1 ? &next : nullptr};
                attend_row_tile(static_cast<int>(to - from), std::make_integer_sequence<int, kHeight>(), tile, from,
                                span, fetch, work, state);
            }
        }
    }
    template <int... kLess>
    void attend_row_tile(int rows, std::integer_sequence<int, kLess...>, const QueryTile& tile, int64_t row,
                         const Span& span, Fetch fetch, Workspace& work, State& state) const {
        using Member = decltype(&AttentionKernel::template attend_rows<1>);
        static constexpr Member table[] = {&AttentionKernel::template attend_rows<kLess + 1>...};
        (this->*table[rows - 1])(tile, row, span, fetch, work, state);
    }

    // Past a tile's last position the last vector's K is read again.
    void find(const QueryTile& tile, int64_t kv_head, int64_t index, Span& span) const {
        span.begin = index * kSpan;
        const int64_t oldest =
            a.sliding_window > 0 ? std::max<int64_t>(0, tile.first_position + 1 - a.sliding_window) : 0;
        const int64_t from = std::max(span.begin, oldest) / kLanes * kLanes;
        const int64_t to = std::min(span.begin + kSpan, tile.first_position + tile.num_queries);
        const int32_t* table = a.block_table + tile.request * a.max_blocks;
        const T* kv = static_cast<const T*>(a.kv) + kv_head * block_size * head_dim;
        int64_t block = from / block_size, offset = from % block_size, v = (from - span.begin) / kLanes;
        std::fill_n(span.values, kSpan / kLanes, nullptr);
        for (int64_t position = from; position < to; ++block, offset = 0) {
            const T* keys = kv + table[block] * a.block_stride;
            const T* values = keys + a.num_kv_heads * block_size * head_dim;
            for (; offset < block_size && position < to; offset += kLanes, position += kLanes, ++v) {
                span.keys[v] = keys + offset * M::kStep;
                span.values[v] = values + offset * head_dim;
            }
        }
        for (int i = 0; i < 8; ++i) span.keys[v + i] = span.keys[v - 1];
    }

    // kRows rows from `row` on.
    template <int kRows>
    void attend_rows(const QueryTile& tile, int64_t row, const Span& span, Fetch fetch, Workspace& work,
                     State& state) const {
        // What each row sees of the span. Rows are in order of their positions.
        int64_t begin[kRows], end[kRows];
        for (int m = 0; m < kRows; ++m) {
            const int64_t next = tile.first_position + (row + m) / group + 1 - span.begin;
            end[m] = std::min(next, kSpan);
            begin[m] = a.sliding_window > 0 ? std::max<int64_t>(0, next - a.sliding_window) : 0;
        }
        if (begin[0] >= end[kRows - 1]) return;
        // One row of floats has so little to compute that the processor's own prefetching does better alone.
        if (kRows == 1 && std::is_same_v<T, float>) fetch.near = nullptr;
        const int64_t first = begin[0] / kLanes, last = (end[kRows - 1] + kLanes - 1) / kLanes;
        score<kRows>(work, span, fetch, row, first, last);
        float peak[kRows], total[kRows];
        soften<kRows>(work, begin, end, first, last, peak, total);
        Factors factors[kRows];
        merge<kRows>(state, row, peak, total, factors);
        // An odd last position of bf16 brings its partner along: written zeros, and its weight is 0.
        const int64_t to = (end[kRows - 1] + M::kStep - 1) / M::kStep * M::kStep;
        const int64_t chunk = fetch.near != nullptr ? kChunk / kLanes : last - first;
        for (int64_t v = first; v < last; v += chunk) {
            const int64_t stop = std::min(last, v + chunk);
            const auto source = [&](int m, int64_t i) ROPEWAY_LAMBDA {
                return v == first ? V::zero() : V::load(work.sums + m * head_dim + i);
            };
            const auto sink = [&](int m, int64_t i, F sums) ROPEWAY_LAMBDA {
                if (stop < last) {
                    V::store(work.sums + m * head_dim + i, sums);
                } else if (peak[m] != kMinusInfinity) {
                    float* to_row = state.sums + (row + m) * head_dim + i;
                    V::store(to_row, factors[m].merge(to_row, sums));
                }
            };
            weigh<kRows, width(kRows)>(work, span, fetch, v, stop, last, to, 0, source, sink);
        }
    }

    template <int kRows>
    void score(Workspace& work, const Span& span, Fetch fetch, int64_t row, int64_t first, int64_t last) const {
        constexpr int kColumns = width(kRows);
        const F scale = V::set(score_scale);
        const int64_t piece = fetch.near != nullptr || fetch.far != nullptr ? kPiece : head_dim;
        for (int64_t v = first; v < last; v += kColumns) {
            F acc[kRows][kColumns];
            const T* keys[kColumns];
            unroll<kRows * kColumns>([&](auto i) ROPEWAY_LAMBDA { acc[i / kColumns][i % kColumns] = V::zero(); });
            unroll<kColumns>([&](auto j) ROPEWAY_LAMBDA { keys[j] = span.keys[v + j]; });
            for (int64_t i = 0; i < head_dim; i += piece) {
                if (fetch.near != nullptr || fetch.far != nullptr)
                    for (int j = 0; j < kColumns; ++j) fetch_beside_keys(span, fetch, v + j, first, last, i);
                const A* q = work.q + row * head_dim + i;
                const int64_t count = std::min(piece, head_dim - i);
                tile<V, T, kRows, kColumns, 1>(q, head_dim, keys, block_size * M::kStep, count, acc);
                unroll<kColumns>([&](auto j) ROPEWAY_LAMBDA { keys[j] += piece * block_size; });
            }
            unroll<kRows * kColumns>([&](auto i) ROPEWAY_LAMBDA {
                V::store(work.scores + i / kColumns * kLine + (v + i % kColumns) * kLanes,
                         V::mul(acc[i / kColumns][i % kColumns], scale));
            });
        }
    }

    // The share of prefetches that goes with the scores of vector v and dimensions [from, from + kPiece).
    ROPEWAY_INLINE void fetch_beside_keys(const Span& span, Fetch fetch, int64_t v, int64_t first, int64_t last,
                                          int64_t from) const {
        if (fetch.near != nullptr) {
            const int64_t ahead = v + kChunk / kLanes, beyond = ahead - last + first;
            if (ahead < last)
                prefetch_keys(span.keys[ahead], from, kPiece);
            else if (beyond < last)
                prefetch_values(span.values[beyond], from, kPiece);
        } else if (fetch.far != nullptr && v < kSpan / kLanes && fetch.far->values[v] != nullptr) {
            prefetch_keys(fetch.far->keys[v], from, kPiece);
        }
    }
    // And with the weighted sum of vector v, dimensions [from, from + count).
    ROPEWAY_INLINE void fetch_beside_values(const Span& span, Fetch fetch, int64_t v, int64_t last, int64_t from,
                                            int64_t count) const {
        if (fetch.near != nullptr) {
            const int64_t ahead = v + kChunk / kLanes, beyond = ahead - last;
            if (ahead < last)
                prefetch_values(span.values[ahead], from, count);
            else if (beyond < kSpan / kLanes && fetch.near->values[beyond] != nullptr)
                prefetch_keys(fetch.near->keys[beyond], from, count);
        } else if (fetch.far != nullptr && fetch.far->values[v] != nullptr) {
            prefetch_values(fetch.far->values[v], from, count);
        }
    }
    // Dimensions [from, from + count) of one vector of positions.
    ROPEWAY_INLINE void prefetch_keys(const T* keys, int64_t from, int64_t count) const {
        if (reinterpret_cast<uintptr_t>(keys) % kCacheLine != 0) return;  // came with the vector before it
        for (int64_t i = from; i < from + count; i += M::kStep) __builtin_prefetch(keys + i * block_size);
    }
    ROPEWAY_INLINE void prefetch_values(const T* values, int64_t from, int64_t count) const {
        constexpr int64_t kPerLine = kCacheLine / sizeof(T);
        for (int64_t i = from * kLanes; i < (from + count) * kLanes; i += kPerLine) __builtin_prefetch(values + i);
    }

    A* weights(Workspace& work) const {
        if constexpr (std::is_same_v<A, float>)
            return work.scores;
        else
            return work.weights;
    }

    // Scores of vectors [first, last) become weights. Row m sees positions [begin[m], end[m]); the weight of the others
    // is 0, whatever their scores are.
    template <int kRows>
    void soften(Workspace& work, const int64_t* begin, const int64_t* end, int64_t first, int64_t last, float* peak,
                float* total) const {
        A* const out = weights(work);
        const F hidden = V::set(kMinusInfinity);
        for (int m = 0; m < kRows; ++m) {
            float* scores = work.scores + m * kLine;
            if (a.soft_cap > 0.0f) {
                const F cap = V::set(a.soft_cap);
                for (int64_t v = first; v < last; ++v)
                    V::store(scores + v * kLanes, V::mul(cap, tanh<V>(V::load(scores + v * kLanes))));
            }
            const auto hide = [&](int64_t i) ROPEWAY_LAMBDA {
                const F lane = V::iota();
                const F from = V::set(static_cast<float>(begin[m] - i)), to = V::set(static_cast<float>(end[m] - i));
                const F score = V::select_less(lane, to, V::load(scores + i), hidden);
                V::store(scores + i, V::select_less(lane, from, hidden, score));
            };
            for (int64_t i = first * kLanes; i < begin[m] && i < last * kLanes; i += kLanes) hide(i);
            for (int64_t i = (last - 1) * kLanes; i >= first * kLanes && i + kLanes > end[m]; i -= kLanes) hide(i);
        }
        F most[kRows], sum[kRows], shift[kRows];
        unroll<kRows>([&](auto m) ROPEWAY_LAMBDA { most[m] = hidden; });
        for (int64_t i = first * kLanes; i < last * kLanes; i += kLanes) {
            unroll<kRows>([&](auto m) ROPEWAY_LAMBDA {
                most[m] = V::max(V::load(work.scores + m * kLine + i), most[m]);
            });
        }
        unroll<kRows>([&](auto m) ROPEWAY_LAMBDA {
            peak[m] = V::max_of(most[m]);
            shift[m] = V::set(peak[m] == kMinusInfinity ? 0.0f : peak[m]);
            sum[m] = V::zero();
        });
        for (int64_t i = first * kLanes; i < last * kLanes; i += kLanes) {
            unroll<kRows>([&](auto m) ROPEWAY_LAMBDA {
                const F weight = exp<V>(V::sub(V::load(work.scores + m * kLine + i), shift[m]));
                sum[m] = V::add(sum[m], weight);
                V::store(out + m * kLine + i, weight);
            });
        }
        unroll<kRows>([&](auto m) ROPEWAY_LAMBDA { total[m] = V::sum(sum[m]); });
    }

    // Weighted sums of V over vectors [first, stop) of positions, up to position `to`; dimensions from `column` on.
    template <int kRows, int kColumns, class Source, class Sink>
    ROPEWAY_INLINE void weigh(Workspace& work, const Span& span, Fetch fetch, int64_t first, int64_t stop,
                              int64_t last, int64_t to, int64_t column, const Source& source, const Sink& sink) const {
        const A* weight = weights(work);
        for (; column + kColumns * kLanes <= head_dim; column += kColumns * kLanes) {
            F acc[kRows][kColumns];
            unroll<kRows * kColumns>([&](auto i) ROPEWAY_LAMBDA {
                acc[i / kColumns][i % kColumns] = source(i / kColumns, column + i % kColumns * kLanes);
            });
            for (int64_t v = first; v < stop; ++v) {
                fetch_beside_values(span, fetch, v, last, column, kColumns * kLanes);
                const T* values = span.values[v] + column * M::kStep;
                tile<V, T, kRows, 1, kColumns>(weight + v * kLanes, kLine, &values, head_dim * M::kStep,
                                               std::min<int64_t>(kLanes, to - v * kLanes), acc);
            }
            unroll<kRows * kColumns>([&](auto i) ROPEWAY_LAMBDA {
                sink(i / kColumns, column + i % kColumns * kLanes, acc[i / kColumns][i % kColumns]);
            });
        }
        if constexpr (kColumns > 1) {
            if (column < head_dim)
                weigh<kRows, (kColumns + 1) / 2>(work, span, fetch, first, stop, last, to, column, source, sink);
        }
    }

    // --- in and out ---

    void load_queries(const QueryTile& tile, int64_t kv_head, A* to) const {
        for (int64_t query = 0; query < tile.num_queries; ++query) {
            const int64_t from = (tile.first_token + query) * a.q_stride + kv_head * group * head_dim;
            for (int64_t i = 0; i < group * head_dim; i += kLanes, to += kLanes) {
                switch (static_cast<Type>(a.type)) {
                    case Type::kF32: V::store(to, V::load(static_cast<const float*>(a.q) + from + i)); break;
                    case Type::kBf16: V::store(to, V::load(static_cast<const bf16*>(a.q) + from + i)); break;
                    case Type::kF16: V::store(to, V::load(static_cast<const f16*>(a.q) + from + i)); break;
                }
            }
        }
    }

    void store_result(const QueryTile& tile, int64_t kv_head, const State& state) const {
        for (int64_t row = 0; row < tile.num_queries * group; ++row) {
            const F total = V::set(state.total[row]);
            const int64_t head = kv_head * group + row % group;
            const int64_t to = ((tile.first_token + row / group) * a.num_heads + head) * head_dim;
            for (int64_t i = 0; i < head_dim; i += kLanes) {
                const F result = V::div(V::load(state.sums + row * head_dim + i), total);
                switch (static_cast<Type>(a.type)) {
                    case Type::kF32: V::store(static_cast<float*>(a.out) + to + i, result); break;
                    case Type::kBf16: V::store(static_cast<bf16*>(a.out) + to + i, result); break;
                    case Type::kF16: V::store(static_cast<f16*>(a.out) + to + i, result); break;
                }
            }
        }
    }
};

template <class V>
void attention(const Attention& a) {
    switch (static_cast<Type>(a.kv_type)) {
        case Type::kF32: return AttentionKernel<V, float>{a}.run();
        case Type::kBf16: return AttentionKernel<V, bf16>{a}.run();
        case Type::kF16: return AttentionKernel<V, f16>{a}.run();
    }
}

}  // namespace
}  // namespace ropeway
