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
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kChunk = 32;  // positions that every row tile takes before any takes the next; prefetches' distance
constexpr int64_t kSideBySide = 8;  // row tiles
constexpr int64_t kCacheLine = 64;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

template <class V, class T>
struct AttentionKernel {
    using F = typename V::F;
    using M = Mac<V, T>;
    using A = typename M::A;
    static constexpr int64_t kLanes = V::kLanes;
    // Register tiles are an even number of vectors wide, as a span and most heads are, or a narrow rest would be left,
    // and an even number of rows high, four being faster than five. Few rows take more vectors, so that enough chains of
    // multiply-adds run side by side, as long as the sums find registers.
    static constexpr int kSums = (M::kPaired ? V::kPairQueryRows : V::kTileRows) * V::kPanelVectors;
    static constexpr int kWidth = V::kPanelVectors + V::kPanelVectors % 2;
    static constexpr int kHeight = kSums / kWidth / 2 * 2;
    static constexpr int width(int rows) {
        int vectors = kWidth;
        while (rows * vectors < 8 && 2 * rows * vectors <= kSums) vectors *= 2;
        return vectors;
    }
    static constexpr int64_t kChunkVectors = std::max<int64_t>(kChunk / kLanes, kWidth);
    static constexpr int kVectorsPerLine = std::max<int>(1, kCacheLine / int64_t{kLanes * M::kStep * sizeof(T)});
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
    struct Item {
        int64_t tile;
        int64_t first_span, end_span;
        int64_t first_head, end_head;  // KV heads
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

    // How a row's sums before a span and those of the span itself are to be scaled to be added.
    struct Factors {
        float before = 1.0f, now = 0.0f;
        F merge(const float* sums, F more) const {
            return V::fma(more, V::set(now), V::mul(V::load(sums), V::set(before)));
        }
    };

    // Where the item's first head has K and V of a span's positions, for each vector of them; the next head has them a
    // tile later. Values are null where a query tile sees none.
    struct Span {
        int64_t begin;  // absolute position
        const T* keys[kSpan / kLanes + 8];
        const T* values[kSpan / kLanes];
    };

    // A row tile on its way through a span.
    struct Unit {
        int64_t head;  // counted from the item's first
        int64_t row;   // counted from the head's first
        int rows;
        bool leads;       // the first of its head: it meets K and V first, and prefetches for all
        const A* q;       // [rows, head_dim]
        float* scores;    // [rows, kLine]
        A* weights;       // [rows, kLine]; floats take the place of the scores
        float* sums;      // [rows, head_dim]
        int64_t begin[kHeight], end[kHeight];  // the positions of the span that each row sees
        int64_t first, last;                   // the vectors of positions that any row sees
        float peak[kHeight], total[kHeight];
        Factors factors[kHeight];
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
    std::atomic<int32_t>* counters = nullptr;  // per tile that is shared out and first head of items: spans done

    // --- the work, and how it is shared out ---

    void run() {
        plan();
        // A thread takes its next item when it comes to the last span of the one at hand, in time to prefetch for it.
        std::atomic<int64_t> taken{0};
        const auto take = [&]() -> const Item* {
            const int64_t index = taken.fetch_add(1, std::memory_order_relaxed);
            return index < num_items ? items + index : nullptr;
        };
        parallel_for(std::min<int64_t>(num_items, num_threads()), [&](int64_t) {
            for (const Item* item = take(); item != nullptr;) item = attend(*item, take);
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

        items = item_memory.get<Item>(most_items * a.num_kv_heads);
        num_items = 0;
        const int64_t share = (cost * a.num_kv_heads + shares - 1) / shares;
        int64_t num_partials = 0, num_counters = 0;
        for (int64_t t = 0; t < num_tiles; ++t) {
            QueryTile& tile = tiles[t];
            const int64_t spans = tile.end_span - tile.first_span;
            const int64_t most = std::max<int64_t>(1, share / row_tiles(tile.num_queries));  // spans times heads
            // Heads lie side by side in a block: an item that has several reads longer runs of memory.
            const int64_t most_heads = std::max<int64_t>(1, std::min(most, kSideBySide / row_tiles(tile.num_queries)));
            const int64_t head_parts = (a.num_kv_heads + most_heads - 1) / most_heads;
            const int64_t most_spans = std::max<int64_t>(1, most * head_parts / a.num_kv_heads);
            const int64_t parts = num_threads() > 1 ? (spans + most_spans - 1) / most_spans : 1;
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t from = spans * part / parts, to = spans * (part + 1) / parts;
                for (int64_t heads = 0; heads < head_parts; ++heads) {
                    items[num_items++] = {t, tile.first_span + from, tile.first_span + to,
                                          a.num_kv_heads * heads / head_parts,
                                          a.num_kv_heads * (heads + 1) / head_parts};
                }
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

    // Returns the item that the thread does next, or null.
    template <class Take>
    const Item* attend(const Item& item, const Take& take) const {
        static thread_local Scratch query_memory, state_memory, unit_memory, score_memory, weight_memory, sums_memory;
        static thread_local Span spans[2];
        const QueryTile& tile = tiles[item.tile];
        const int64_t rows = tile.num_queries * group, heads = item.end_head - item.first_head;
        const int64_t parts = row_tiles(tile.num_queries), num_units = heads * parts;
        // Few row tiles go through a span side by side, so that memory is read in order. Many have too many scores to
        // keep and much to compute: they go one after another.
        const int64_t together = num_units <= kSideBySide ? num_units : 1;
        A* q = query_memory.get<A>(heads * rows * head_dim);
        Unit* units = unit_memory.get<Unit>(num_units);
        float* scores = score_memory.get<float>(together * kHeight * kLine);
        float* sums = sums_memory.get<float>(together * kHeight * head_dim);
        A* weights;
        if constexpr (std::is_same_v<A, float>)
            weights = scores;
        else
            weights = weight_memory.get<A>(together * kHeight * kLine);
        for (int64_t head = 0; head < heads; ++head) {
            load_queries(tile, item.first_head + head, q + head * rows * head_dim);
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t row = rows * part / parts, index = head * parts + part, slot = index % together;
                Unit& unit = units[index];
                unit.head = head;
                unit.row = row;
                unit.rows = static_cast<int>(rows * (part + 1) / parts - row);
                unit.leads = part == 0;
                unit.q = q + (head * rows + row) * head_dim;
                unit.scores = scores + slot * kHeight * kLine;
                unit.weights = weights + slot * kHeight * kLine;
                unit.sums = sums + slot * kHeight * head_dim;
            }
        }
        const int64_t size = State::size(rows, head_dim);
        float* memory = state_memory.get<float>(heads * size);
        const auto own = [&](int64_t head) { return State(memory + head * size, rows, head_dim); };
        for (int64_t head = 0; head < heads; ++head) own(head).clear(rows, head_dim);
        const Item* following = nullptr;
        find(tile, item.first_head, item.first_span, spans[item.first_span % 2]);
        for (int64_t s = item.first_span; s < item.end_span; ++s) {
            const Span& span = spans[s % 2];
            Span& next = spans[(s + 1) % 2];
            if (s + 1 < item.end_span) {
                find(tile, item.first_head, s + 1, next);
            } else if ((following = take()) != nullptr) {
                find(tiles[following->tile], following->first_head, following->first_span, next);
            } else {
                std::fill_n(next.values, kSpan / kLanes, nullptr);
            }
            const auto state_of = [&](int64_t head) {
                return tile.partial < 0 ? own(head) : partial(tile, item.first_head + head, s);
            };
            if (tile.partial >= 0)
                for (int64_t head = 0; head < heads; ++head) state_of(head).clear(rows, head_dim);
            for (int64_t from = 0; from < num_units; from += together)
                attend_side_by_side(tile, units + from, together, span, next, state_of);
        }
        if (tile.partial >= 0) {
            const auto done = static_cast<int32_t>(item.end_span - item.first_span);
            const int32_t before = counters[tile.counter + item.first_head].fetch_add(done, std::memory_order_acq_rel);
            if (before + done < tile.end_span - tile.first_span) return following;
            for (int64_t head = 0; head < heads; ++head) merge_partials(tile, item.first_head + head, own(head));
        }
        for (int64_t head = 0; head < heads; ++head) store_result(tile, item.first_head + head, own(head));
        return following;
    }

    void merge_partials(const QueryTile& tile, int64_t kv_head, State state) const {
        for (int64_t s = tile.first_span; s < tile.end_span; ++s) {
            const State alone = partial(tile, kv_head, s);
            for (int64_t row = 0; row < tile.num_queries * group; ++row) {
                if (alone.peak[row] == kMinusInfinity) continue;
                Factors factors;
                merge<1>(state, row, alone.peak + row, alone.total + row, &factors);
                float* sums = state.sums + row * head_dim;
                for (int64_t i = 0; i < head_dim; i += kLanes)
                    V::store(sums + i, factors.merge(sums + i, V::load(alone.sums + row * head_dim + i)));
            }
        }
    }

    // --- one span ---

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

    // A span for some units: chunk by chunk each takes K, then scores become weights, then chunk by chunk each takes V.
    template <class StateOf>
    void attend_side_by_side(const QueryTile& tile, Unit* units, int64_t count, const Span& span, const Span& next,
                             const StateOf& state_of) const {
        int64_t first = kSpan / kLanes, last = 0;
        for (int64_t u = 0; u < count; ++u) {
            Unit& unit = units[u];
            for (int m = 0; m < unit.rows; ++m) {
                const int64_t limit = tile.first_position + (unit.row + m) / group + 1 - span.begin;
                unit.end[m] = std::min(limit, kSpan);
                unit.begin[m] = a.sliding_window > 0 ? std::max<int64_t>(0, limit - a.sliding_window) : 0;
            }
            // Rows are in order of their positions.
            unit.first = unit.begin[0] / kLanes;
            unit.last = (unit.end[unit.rows - 1] + kLanes - 1) / kLanes;
            if (unit.begin[0] >= unit.end[unit.rows - 1]) unit.last = unit.first;
            if (unit.first == unit.last) continue;
            first = std::min(first, unit.first);
            last = std::max(last, unit.last);
        }
        // One that has a span in the second-level cache, where the one before it left it, need not stop at chunks.
        const int64_t step = count > 1 || units[0].leads ? kChunkVectors : kSpan / kLanes;
        const auto for_units = [&](int64_t from, const auto& body) {
            for (int64_t u = 0; u < count; ++u) {
                Unit& unit = units[u];
                const int64_t begin = std::max(from, unit.first), end = std::min(from + step, unit.last);
                if (begin < end) body(unit, begin, end);
            }
        };
        // Meanwhile the next chunk of the same head is brought nearer: after K comes V, after V the next span's K, be
        // it another item's. Prefetches are in the order in which lines lie in memory, or the processor's own
        // prefetching is misled. That order is all that they follow, so a tile of V can be fetched as if it were one of
        // K, and the other way round.
        const int64_t to_values = a.num_kv_heads * block_size * head_dim;
        for (int64_t v = first; v < last; v += step) {
            const bool more = v + step < last;
            for_units(v, [&](Unit& unit, int64_t from, int64_t to) {
                const int64_t ahead = more ? from + step : first;
                const bool fetches = unit.leads && ahead + kChunkVectors <= last;
                call(fetches, unit.rows, [&](auto fetch, auto rows) {
                    score<rows, fetch>(unit, span, from, to, span.keys + ahead, more ? 0 : to_values);
                });
            });
        }
        for (int64_t u = 0; u < count; ++u) {
            Unit& unit = units[u];
            if (unit.first == unit.last) continue;
            call(false, unit.rows, [&](auto, auto rows) { soften<rows>(unit, state_of(unit.head)); });
        }
        for (int64_t v = first; v < last; v += step) {
            const bool more = v + step < last;
            for_units(v, [&](Unit& unit, int64_t from, int64_t to) {
                const bool whole =
                    more ? from + step + kChunkVectors <= last : next.values[kChunkVectors - 1] != nullptr;
                call(unit.leads && whole, unit.rows, [&](auto fetch, auto rows) {
                    weigh<rows, fetch>(unit, span, from, to, more ? span.values + from + step : next.values,
                                       more ? 0 : -to_values, state_of(unit.head));
                });
            });
        }
    }

    // body(flag, rows) with constant arguments.
    template <class Body>
    static void call(bool flag, int rows, const Body& body) {
        unroll<kHeight>([&](auto less) ROPEWAY_LAMBDA {
            constexpr int kRows = less + 1;
            if (rows != kRows) return;
            if (flag)
                body(std::true_type(), std::integral_constant<int, kRows>());
            else
                body(std::false_type(), std::integral_constant<int, kRows>());
        });
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
            // Blocks are anywhere: a line of each, a span ahead, brings the translation of its address along.
            __builtin_prefetch(keys);
            __builtin_prefetch(values);
            for (; offset < block_size && position < to; offset += kLanes, position += kLanes, ++v) {
                span.keys[v] = keys + offset * M::kStep;
                span.values[v] = values + offset * head_dim;
            }
        }
        for (int i = 0; i < 8; ++i) span.keys[v + i] = span.keys[v - 1];
    }

    // Scores of vectors [from, to) of positions. What the last register tile writes beyond is written again or unread.
    // kFetch: prefetch what lies `offset` elements from the addresses at `ahead`, of as many vectors.
    template <int kRows, bool kFetch>
    __attribute__((noinline)) void score(const Unit& unit, const Span& span, int64_t from, int64_t to,
                                         const T* const* ahead, int64_t offset) const {
        constexpr int kColumns = std::min<int>(width(kRows), kChunkVectors);
        const F scale = V::set(score_scale);
        const int64_t head = unit.head * block_size * head_dim;
        for (int64_t v = from; v < to; v += kColumns) {
            F acc[kRows][kColumns];
            const T *keys[kColumns], *lines[kColumns];
            unroll<kRows * kColumns>([&](auto i) ROPEWAY_LAMBDA { acc[i / kColumns][i % kColumns] = V::zero(); });
            unroll<kColumns>([&](auto j) ROPEWAY_LAMBDA { keys[j] = span.keys[v + j] + head; });
            if constexpr (kFetch)
                unroll<kColumns>([&](auto j) ROPEWAY_LAMBDA { lines[j] = ahead[v - from + j] + head + offset; });
            const auto fetch = [&](int64_t i) ROPEWAY_LAMBDA {
                unroll<kFetch ? kColumns : 0>([&](auto j) ROPEWAY_LAMBDA {
                    if (j % kVectorsPerLine == 0) __builtin_prefetch(lines[j] + i * block_size);
                });
            };
            tile<V, T, kRows, kColumns, 1>(unit.q, head_dim, keys, block_size * M::kStep, head_dim, acc, fetch);
            unroll<kRows * kColumns>([&](auto i) ROPEWAY_LAMBDA {
                V::store(unit.scores + i / kColumns * kLine + (v + i % kColumns) * kLanes,
                         V::mul(acc[i / kColumns][i % kColumns], scale));
            });
        }
    }

    // Scores of vectors [first, last) become weights. Row m sees positions [begin[m], end[m]); the weight of the others
    // is 0, whatever their scores are.
    template <int kRows>
    __attribute__((noinline)) void soften(Unit& unit, State state) const {
        A* const out = unit.weights;
        const int64_t first = unit.first, last = unit.last;
        const int64_t *const begin = unit.begin, *const end = unit.end;
        const F hidden = V::set(kMinusInfinity);
        for (int m = 0; m < kRows; ++m) {
            float* scores = unit.scores + m * kLine;
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
                most[m] = V::max(V::load(unit.scores + m * kLine + i), most[m]);
            });
        }
        unroll<kRows>([&](auto m) ROPEWAY_LAMBDA {
            unit.peak[m] = V::max_of(most[m]);
            shift[m] = V::set(unit.peak[m] == kMinusInfinity ? 0.0f : unit.peak[m]);
            sum[m] = V::zero();
        });
        for (int64_t i = first * kLanes; i < last * kLanes; i += kLanes) {
            unroll<kRows>([&](auto m) ROPEWAY_LAMBDA {
                const F weight = exp<V>(V::sub(V::load(unit.scores + m * kLine + i), shift[m]));
                sum[m] = V::add(sum[m], weight);
                V::store(out + m * kLine + i, weight);
            });
        }
        unroll<kRows>([&](auto m) ROPEWAY_LAMBDA { unit.total[m] = V::sum(sum[m]); });
        merge<kRows>(state, unit.row, unit.peak, unit.total, unit.factors);
    }

    // Adds vectors [from, to) of positions to the weighted sums of V, and those of a whole span to the state. kFetch:
    // as in score.
    template <int kRows, bool kFetch>
    __attribute__((noinline)) void weigh(const Unit& unit, const Span& span, int64_t from, int64_t to,
                                         const T* const* ahead, int64_t offset, State state) const {
        weigh_columns<kRows, width(kRows), kFetch>(unit, span, from, to, ahead, offset, state, 0);
    }
    template <int kRows, int kColumns, bool kFetch>
    ROPEWAY_INLINE void weigh_columns(const Unit& unit, const Span& span, int64_t from, int64_t to,
                                      const T* const* ahead, int64_t offset, const State& state, int64_t column) const {
        // An odd last position of bf16 brings its partner along: written zeros, and its weight is 0.
        const int64_t end = (unit.end[kRows - 1] + M::kStep - 1) / M::kStep * M::kStep;
        const int64_t head = unit.head * block_size * head_dim;
        // Each vector of each group of columns prefetches one share. A group of columns takes only a part of every line
        // or few, so its own addresses would not do: see above about the order.
        constexpr int64_t kShare = kLanes * kColumns * kLanes;
        const int64_t shares = std::max<int64_t>(1, head_dim / (kColumns * kLanes));  // of a vector
        int64_t share = 0;
        for (; column + kColumns * kLanes <= head_dim; column += kColumns * kLanes) {
            F acc[kRows][kColumns];
            unroll<kRows * kColumns>([&](auto i) ROPEWAY_LAMBDA {
                const float* sums = unit.sums + i / kColumns * head_dim + column + i % kColumns * kLanes;
                acc[i / kColumns][i % kColumns] = from == unit.first ? V::zero() : V::load(sums);
            });
            for (int64_t v = from; v < to; ++v, ++share) {
                const T* values = span.values[v] + head + column * M::kStep;
                const T* lines = kFetch ? ahead[share / shares] + head + offset + share % shares * kShare : nullptr;
                const auto fetch = [&](int64_t i) ROPEWAY_LAMBDA {
                    unroll<kFetch ? kColumns : 0>([&](auto j) ROPEWAY_LAMBDA {
                        if (j % kVectorsPerLine == 0)
                            __builtin_prefetch(lines + (i * kColumns + j * M::kStep) * kLanes);
                    });
                };
                tile<V, T, kRows, 1, kColumns>(unit.weights + v * kLanes, kLine, &values, head_dim * M::kStep,
                                               std::min<int64_t>(kLanes, end - v * kLanes), acc, fetch);
            }
            unroll<kRows * kColumns>([&](auto i) ROPEWAY_LAMBDA {
                constexpr int m = i / kColumns;
                const int64_t at = column + i % kColumns * kLanes;
                if (to < unit.last) {
                    V::store(unit.sums + m * head_dim + at, acc[m][i % kColumns]);
                } else if (unit.peak[m] != kMinusInfinity) {
                    float* to_row = state.sums + (unit.row + m) * head_dim + at;
                    V::store(to_row, unit.factors[m].merge(to_row, acc[m][i % kColumns]));
                }
            });
        }
        if constexpr (kColumns > 1) {
            if (column < head_dim)
                weigh_columns<kRows, (kColumns + 1) / 2, false>(unit, span, from, to, ahead, offset, state, column);
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
