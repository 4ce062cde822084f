// Element types, argument blocks of the exported functions, and the table that each instruction set fills.
//
// Owns: the binary interface between the Python loader (../__init__.py mirrors every struct here) and the kernels.
// Must not know: torch, Python, instruction sets. Included by every file of this folder.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ropeway {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

enum class Type : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

inline int64_t size_of(Type type) { return type == Type::kF32 ? 4 : 2; }

// Weights [N, K] as the kernels read them: panels of `panel` consecutive outputs, each panel K-major,
//   [ceil(N / panel)][K / step][panel][step]
// where `step` is 2 for bf16 (a pair along K shares 32 bits) and 1 for the others. Outputs past N are zeros.
struct Linear {
    const void* packed;
    const float* bias;  // [N] or null
    int64_t out_features;  // N
    int64_t in_features;   // K, a multiple of step
    int32_t type;          // Type of the weights
    int32_t panel;
};

// One step's paged attention of one layer. A block of one layer is K [num_kv_heads] tiles, then V [num_kv_heads] tiles;
// the tile layouts are described in attention.h.
struct Attention {
    const void* q;         // [num_tokens, *] rows of num_heads * head_dim elements, q_stride elements apart
    void* out;             // [num_tokens, num_heads * head_dim], contiguous
    const void* kv;        // block 0 of this layer
    int64_t q_stride;      // elements
    int64_t block_stride;  // elements from one block of this layer to the next
    const int32_t* query_start_loc;  // [num_reqs + 1]
    const int32_t* seq_lens;         // [num_reqs]
    const int32_t* block_table;      // [num_reqs, max_blocks]
    int64_t max_blocks;
    int64_t num_reqs;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t block_size;
    int32_t type;            // of q and out
    int32_t kv_type;         // of the cache
    int32_t sliding_window;  // 0: none
    float scale;
    float soft_cap;  // 0: none
};

// Per-head norms (optional), rotation, and the write of K and V into the cache, for all tokens of a step.
struct RopeKv {
    void* qkv;             // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; q is replaced by its rotation
    void* kv;              // block 0 of this layer
    const float* cos;      // [num_tokens, rotary_dim / 2]
    const float* sin;
    const float* q_norm;   // [head_dim] or null
    const float* k_norm;
    const int64_t* slot_mapping;  // [num_tokens]
    int64_t num_tokens;
    int64_t block_stride;  // elements
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t rotary_dim;
    int32_t block_size;
    int32_t type;     // of qkv
    int32_t kv_type;  // of the cache
    float eps;
};

// One layer of a decoder on one rank, and what all its layers share. Norm weights are float32; null: there is no such norm.
struct Layer {
    Linear qkv, out, gate_up, down;
    const float* attention_norm;
    const float* attention_out_norm;
    const float* mlp_norm;
    const float* mlp_out_norm;
    const float* q_norm;
    const float* k_norm;
    void* kv;                // block 0 of this layer
    int32_t rotary;          // which of a step's angles
    int32_t sliding_window;  // 0: none
    float scale;
    float soft_cap;  // 0: none
};

constexpr int kMaxRotaries = 2;

struct Stack {
    const Layer* layers;
    const float* norm;               // after the last layer
    const float* cos[kMaxRotaries];  // [positions, rotary_dim / 2] for each kind of rotation; null: there is none
    const float* sin[kMaxRotaries];
    int64_t num_layers;
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t block_stride;  // elements
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t rotary_dim;
    int32_t block_size;
    int32_t type;     // of activations
    int32_t kv_type;  // of the cache
    int32_t gate;     // Gate
    float eps;
};

// One step through a stack. Fields as in Attention and RopeKv.
struct StackStep {
    void* hidden;              // [num_tokens, hidden_size]: the embeddings; used up
    void* out;                 // [num_indices, hidden_size]: the last norm of the tokens `indices`
    const int64_t* positions;  // [num_tokens]
    const int64_t* indices;    // [num_indices]
    const int64_t* slot_mapping;
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    const int32_t* block_table;
    int64_t max_blocks;
    int64_t num_reqs;
    int64_t num_tokens;
    int64_t num_indices;
};

// The rows of a step that draw a token at a temperature. Logits, best and tokens are those of all rows, line by line.
struct Sample {
    const float* logits;        // lines `stride` elements apart
    const float* best;          // [lines] the greatest logit; a line where it is not finite is left alone
    int64_t* tokens;            // [lines] the first token with the best logit; replaced by the token drawn
    const int64_t* rows;        // [num_rows] their lines
    const float* temperature;   // [num_rows]
    const int32_t* noise_keys;  // [num_rows, 2]
    const int64_t* filtered;    // [num_filtered] which of the rows have the filters below
    const int64_t* top_k;       // [num_filtered] at least 1; vocab_size or more: no bound
    const float* top_p;         // [num_filtered]
    const float* min_p;         // [num_filtered]
    int64_t num_rows;
    int64_t num_filtered;
    int64_t vocab_size;
    int64_t stride;
};

// The rows of a step that have penalties.
struct Penalise {
    float* logits;                 // lines `stride` elements apart
    const int64_t* rows;           // [num_rows] their lines
    const int64_t* slots;          // [num_rows] their lines in the two tables below
    const float* presence;         // [num_rows]
    const float* frequency;        // [num_rows]
    const float* repetition;       // [num_rows]
    const int32_t* output_counts;  // [*, vocab_size] how often each token was generated
    const uint8_t* in_prompt;      // [*, vocab_size] 0 or 1
    int64_t num_rows;
    int64_t vocab_size;
    int64_t stride;
};

enum class Gate : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

// What one instruction set offers. A null entry falls to the next narrower set.
struct Kernels {
    const char* name;
    int32_t lanes;  // floats in a vector; head_dim and block_size must be multiples of it
    int32_t panel;  // see Linear

    // y[m, n] = sum_k x[m, k] * w[n, k] + bias[n]. x and y are rows x_stride and y_stride elements apart.
    void (*linear)(const Linear&, const void* x, Type x_type, int64_t rows, int64_t x_stride, void* y, Type y_type,
                   int64_t y_stride);
    void (*attention)(const Attention&);
    void (*rope_kv)(const RopeKv&);
    // residual += x (when residual is not null), out = norm(residual or x) * weight, all [rows, size] of one type.
    void (*rms_norm)(const void* x, void* residual, const float* weight, void* out, Type type, int64_t rows,
                     int64_t size, float eps);
    // The same norm as int8, scales[m] * out[m, i] with scales[m] = max |norm| / 127. A row of zeros has scale 0, one with
    // an infinity or a NaN has a scale that is not finite, and both have zeros in out.
    void (*rms_norm_int8)(const void* x, void* residual, const float* weight, int8_t* out, float* scales, Type type,
                          int64_t rows, int64_t size, float eps);
    // out[m, i] = gate(x[m, i]) * x[m, size + i]; x is [rows, 2 * size], out [rows, size].
    void (*gated)(const void* x, void* out, Type type, int64_t rows, int64_t size, Gate gate);
    // Per row the greatest value and its first index; a row with a NaN gives NaN.
    void (*argmax)(const float* x, int64_t rows, int64_t size, int64_t stride, float* value, int64_t* index);
    // In place: the logit of a token seen is divided by repetition, or multiplied if it is below 0; then frequency times
    // count is subtracted, then presence if the token was generated.
    void (*penalise)(const Penalise&);
    // Draws from softmax(logits / temperature) over what top_k, top_p (of what top_k left) and min_p (relative to the
    // best) leave. Equal scores stay together, and the best always stays.
    void (*sample)(const Sample&);
    // For benchmarks: operations per second of the multiply-add units; bytes per second read from memory.
    double (*peak)(int64_t iterations);
    double (*read_rate)(const void* memory, int64_t size);
};

// The sets that this build holds; null where the processor family is another.
extern const Kernels* const kAvx2;
extern const Kernels* const kAvx512;
extern const Kernels* const kAvx512Bf16;
extern const Kernels* const kNeon;
extern const Kernels* const kScalar;

}  // namespace ropeway
