// Tokens drawn at a temperature, and the penalties on repeated ones.
//
// Owns: which tokens top_k, top_p and min_p leave, the noise, the race that draws one of them.
// Must not know: requests, instruction sets. Called by: the dispatch table of each instruction set.
//
// A token's score is (logit - best logit) / temperature and its weight e^score. Each runs for a time distributed as
// Exp(1) over its weight, and the first wins; that time's noise is a hash of (keys, token), so nothing is stored or
// shared. A row is computed by one thread in an order that depends on the vocabulary's size alone; so its token is the
// same in any batch and with any number of threads.
//
// What makes it cheap: a row is first reduced to the greatest score of each block, and after that a block is looked at
// only where one of its tokens can matter; only the scores in one bin are sorted; a few tokens need a logarithm.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "elementwise.h"  // for_vectors
#include "threads.h"
#include "tile.h"
#include "vec_math.h"

namespace ropeway {
namespace {

constexpr int kBlock = 64;         // tokens; a multiple of every vector
constexpr float kLowest = -88.0f;  // lower scores weigh nothing

// --- score bins ---

// Scores fall into bins by their upper bits: so bins are narrow where weights are great, whatever the temperature.
// Bin 0 is the best; kBins, which holds what weighs nothing, is none of them.
constexpr int kBinShift = 15;
constexpr int32_t kFirstBin = 0x37800000 >> kBinShift;            // 2^-16: all scores nearer to 0 share bin 0
constexpr int32_t kBins = (0x42b00000 >> kBinShift) - kFirstBin;  // 88

ROPEWAY_INLINE void bins_of(const float* scores, int64_t count, int32_t* bins) {
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, scores + i, sizeof(bits));
        const int32_t bin = static_cast<int32_t>((bits & 0x7fffffff) >> kBinShift) - kFirstBin;
        bins[i] = std::min(std::max(bin, 0), kBins);
    }
}

// --- noise ---

// u in (0, 1) for tokens begin, begin + 1, ...; -log1p(-u) is the noise. float32 is finest near 0, where winners are.
// The hash is MurmurHash3's 32-bit finalizer, keyed before and within.
inline void uniform_noise(uint32_t begin, uint32_t key, uint32_t second_key, float* u) {
    for (uint32_t i = 0; i < kBlock; ++i) {
        uint32_t h = (begin + i) * 0x9e3779b1u + key;
        h = (h ^ (h >> 16)) * 0x85ebca6bu;
        h ^= second_key;
        h = (h ^ (h >> 13)) * 0xc2b2ae35u;
        h ^= h >> 16;
        // Not 1, to which the greatest round: such a token would have no speed at all.
        u[i] = std::min((static_cast<float>(static_cast<int32_t>(h & 0x7fffffff)) + 0.5f) * 0x1p-31f, 1 - 0x1p-24f);
    }
}

// Rounded once, so never below u.
inline float exponential(float u) { return static_cast<float>(-std::log1p(-static_cast<double>(u))); }

// --- one row ---

template <class V>
struct Draw {
    using F = typename V::F;

    const float* logits;
    int64_t size;
    float peak;  // the best logit
    float temperature;
    uint32_t keys[2];
    float* greatest;  // [blocks] room for the greatest score of each block
    int64_t blocks = (size + kBlock - 1) / kBlock;

    struct Block {
        alignas(64) float line[kBlock];
    };

    // -infinity behind the vocabulary's end.
    ROPEWAY_INLINE const float* logits_of(int64_t block, Block& padded) const {
        const int64_t begin = block * kBlock;
        if (begin + kBlock <= size) return logits + begin;
        std::fill_n(padded.line, kBlock, -std::numeric_limits<float>::infinity());
        std::copy(logits + begin, logits + size, padded.line);
        return padded.line;
    }

    // Shifted before it is scaled: the best is exactly 0 whatever the temperature.
    ROPEWAY_INLINE void scores_of(int64_t block, Block& scores) const {
        const float* from = logits_of(block, scores);
        for (int i = 0; i < kBlock; i += V::kLanes)
            V::store(scores.line + i, V::div(V::sub(V::load(from + i), V::set(peak)), V::set(temperature)));
    }

    ROPEWAY_INLINE static void weights_of(const float* scores, float* weights) {
        for (int i = 0; i < kBlock; i += V::kLanes) V::store(weights + i, exp<V>(V::load(scores + i)));
    }

    void find_greatest() const {
        Block padded;
        for (int64_t block = 0; block < blocks; ++block) {
            const float* from = logits_of(block, padded);
            F most = V::load(from);
            for (int i = V::kLanes; i < kBlock; i += V::kLanes) most = V::max(most, V::load(from + i));
            greatest[block] = (V::max_of(most) - peak) / temperature;
        }
    }

    // --- the cutoff ---

    // Count and weight of the tokens in each bin, complete for scores from `floor` up.
    struct Histogram {
        int32_t count[kBins + 1];
        double weight[kBins + 1];
        double total;  // weight of the whole row; without meaning where tokens are counted
    };

    void fill(Histogram& bins, float floor, bool counted, bool weighed) const {
        std::memset(&bins, 0, sizeof(bins));
        Block scores, weights;
        alignas(64) int32_t bin[kBlock];
        for (int64_t block = 0; block < blocks; ++block) {
            const bool reaches = greatest[block] >= floor;
            if (!reaches && counted) continue;  // top_p is then a share of what top_k leaves
            scores_of(block, scores);
            if (weighed) {
                weights_of(scores.line, weights.line);
                F sum = V::load(weights.line);
                for (int i = V::kLanes; i < kBlock; i += V::kLanes) sum = V::add(sum, V::load(weights.line + i));
                bins.total += V::sum(sum);
            }
            if (!reaches) continue;
            bins_of(scores.line, kBlock, bin);
            if (counted)
                for (int i = 0; i < kBlock; ++i) ++bins.count[bin[i]];
            if (weighed)
                for (int i = 0; i < kBlock; ++i) bins.weight[bin[i]] += weights.line[i];
        }
    }

    // The scores in one bin, falling; their number.
    int64_t members(int32_t bin, float* found) const {
        Block scores;
        alignas(64) int32_t bins[kBlock];
        int64_t count = 0;
        for (int64_t block = 0; block < blocks; ++block) {
            int32_t first;
            bins_of(greatest + block, 1, &first);
            if (first > bin) continue;
            scores_of(block, scores);
            bins_of(scores.line, kBlock, bins);
            int32_t here = 0;  // in most blocks none: found out in whole vectors
            for (int i = 0; i < kBlock; ++i) here += bins[i] == bin;
            if (here == 0) continue;
            for (int i = 0; i < kBlock; ++i) {
                found[count] = scores.line[i];
                count += bins[i] == bin;
            }
        }
        std::sort(found, found + count, std::greater<float>());
        return count;
    }

    // The lowest score that top_k, and top_p of what it leaves, let stay.
    float cutoff(int64_t top_k, float top_p) const {
        static thread_local Scratch bins_scratch, members_scratch;
        const bool bounded = top_k < size;
        // Neither bound lies below `floor`. At least k tokens reach the greatest score of the k-th best block. And
        // tokens lighter than (1 - top_p) / size weigh less than 1 - top_p together, when the best alone weighs 1; half
        // of that, to be safe from rounding.
        float floor = kLowest;
        float* found = members_scratch.get<float>(blocks * kBlock + 1);
        if (!bounded) {
            floor = std::max(floor, std::log((1 - top_p) / (2 * static_cast<float>(size))));
        } else if (top_k <= blocks) {
            std::copy_n(greatest, blocks, found);
            std::nth_element(found, found + top_k - 1, found + blocks, std::greater<float>());
            floor = std::max(floor, found[top_k - 1]);
        }
        Histogram& bins = *bins_scratch.get<Histogram>(1);
        fill(bins, floor, bounded, top_p < 1);

        float lowest = kLowest;
        double total = bins.total;  // of what top_k leaves
        if (bounded) {
            int64_t left = top_k;
            int32_t bin = 0;
            for (total = 0.0; bin < kBins && bins.count[bin] < left; ++bin) {
                left -= bins.count[bin];
                total += bins.weight[bin];
            }
            if (bin < kBins) {
                members(bin, found);
                lowest = found[left - 1];
                for (int64_t i = 0; i < left; ++i) total += weight(found[i]);
            }
        }
        if (top_p < 1) {
            double better = 0.0;  // weight of all better tokens; one stays if that is less than the share
            const double share = top_p * total;
            int32_t bin = 0;
            for (; bin < kBins && better + bins.weight[bin] < share; ++bin) better += bins.weight[bin];
            if (bin < kBins) {
                const int64_t count = members(bin, found);
                int64_t last = 0;
                for (; last + 1 < count; ++last) {
                    better += weight(found[last]);
                    if (better >= share) break;
                }
                lowest = std::max(lowest, found[last]);
            }
        }
        return lowest;
    }

    // One token's, the same bits as in a vector.
    static float weight(float score) {
        float lanes[V::kLanes];
        V::store(lanes, exp<V>(V::set(score)));
        return lanes[0];
    }

    // --- the race ---

    // The token with the greatest weight / noise among those whose score is `lowest` at least and whose weight is min_p
    // at least; the first of equals. `best`, the token with the best logit, always runs.
    int64_t race(int64_t best, float lowest, float min_p) const {
        Block scores, weights, u;
        const float least = std::max(min_p, FLT_MIN);  // a weight of 0 never wins
        uniform_noise(static_cast<uint32_t>(best / kBlock * kBlock), keys[0], keys[1], u.line);
        int64_t winner = best;
        float lead = 1.0f / exponential(u.line[best % kBlock]);
        // The noise is u at least, so a token has lost where weight < lead * u. Most lose so, for the price of a
        // product. And u is 2^-32 at least, so a score below log(lead) - 22.18 has lost whatever its noise. `bound` and
        // `reach` are those limits with a margin for rounding.
        float bound, reach;
        const auto take = [&](int64_t token, float value) {
            winner = token;
            lead = value;
            bound = lead * (1 - 1e-6f);
            reach = std::max(std::max(lowest, std::log(least) - 0.01f), std::log(lead) - 22.2f);
        };
        take(winner, lead);
        for (int64_t block = 0; block < blocks; ++block) {
            if (greatest[block] < reach) continue;
            scores_of(block, scores);
            weights_of(scores.line, weights.line);
            uniform_noise(static_cast<uint32_t>(block * kBlock), keys[0], keys[1], u.line);
            F most = V::set(-1.0f);
            for (int i = 0; i < kBlock; i += V::kLanes)
                most = V::max(most, V::sub(V::load(weights.line + i), V::mul(V::set(bound), V::load(u.line + i))));
            if (V::max_of(most) < 0) continue;
            for (int i = 0; i < kBlock; ++i) {
                const float weight = weights.line[i];
                if (weight < bound * u.line[i] || scores.line[i] < lowest || weight < least) continue;
                const float value = weight / exponential(u.line[i]);
                const int64_t token = block * kBlock + i;
                if (value > lead || (value == lead && token < winner)) take(token, value);
            }
        }
        return winner;
    }
};

template <class V>
void sample(const Sample& args) {
    static thread_local Scratch scratch;
    int64_t* filter = scratch.get<int64_t>(args.num_rows);  // per row its line among the filters; -1: none
    std::fill_n(filter, args.num_rows, -1);
    for (int64_t i = 0; i < args.num_filtered; ++i) filter[args.filtered[i]] = i;
    parallel_for(args.num_rows, [&](int64_t row) {
        static thread_local Scratch greatest;
        const int64_t line = args.rows[row];
        if (!std::isfinite(args.best[line])) return;
        const int32_t* keys = args.noise_keys + 2 * row;
        const Draw<V> draw{args.logits + line * args.stride,
                           args.vocab_size,
                           args.best[line],
                           args.temperature[row],
                           {static_cast<uint32_t>(keys[0]), static_cast<uint32_t>(keys[1])},
                           greatest.get<float>((args.vocab_size + kBlock - 1) / kBlock)};
        draw.find_greatest();
        float lowest = kLowest, min_p = 0.0f;
        if (const int64_t f = filter[row]; f >= 0) {
            min_p = args.min_p[f];
            if (args.top_k[f] < args.vocab_size || args.top_p[f] < 1)
                lowest = draw.cutoff(args.top_k[f], args.top_p[f]);
        }
        args.tokens[line] = draw.race(args.tokens[line], lowest, min_p);
    });
}

// --- penalties ---

template <class V>
void penalise_row(float* x, const int32_t* counts, const uint8_t* in_prompt, int64_t size, float presence,
                  float frequency, float repetition) {
    using F = typename V::F;
    const F zero = V::zero(), one = V::set(1.0f);
    float count[kBlock], seen[kBlock];
    for (int64_t begin = 0; begin < size; begin += kBlock) {
        const int64_t tokens = std::min<int64_t>(kBlock, size - begin);
        for (int64_t i = 0; i < tokens; ++i) {
            count[i] = static_cast<float>(counts[begin + i]);
            seen[i] = static_cast<float>(counts[begin + i] | in_prompt[begin + i]);
        }
        for_vectors<V>(tokens, [&](int64_t i, auto width) ROPEWAY_LAMBDA {
            const F value = load<V>(x + begin + i, width), generated = load<V>(count + i, width);
            const F divided = V::div(value, V::set(repetition)), multiplied = V::mul(value, V::set(repetition));
            const F repeated = V::select_less(zero, value, divided, multiplied);
            F result = V::select_less(zero, load<V>(seen + i, width), repeated, value);
            result = V::sub(result, V::mul(V::set(frequency), generated));
            result = V::sub(result, V::mul(V::set(presence), V::select_less(zero, generated, one, zero)));
            store<V>(x + begin + i, result, width);
        });
    }
}

template <class V>
void penalise(const Penalise& args) {
    parallel_for(args.num_rows, [&](int64_t row) {
        const int64_t slot = args.slots[row] * args.vocab_size;
        penalise_row<V>(args.logits + args.rows[row] * args.stride, args.output_counts + slot, args.in_prompt + slot,
                        args.vocab_size, args.presence[row], args.frequency[row], args.repetition[row]);
    });
}

}  // namespace
}  // namespace ropeway
