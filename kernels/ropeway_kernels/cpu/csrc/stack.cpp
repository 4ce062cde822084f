// All layers of a decoder in one call. From Python a layer is nine calls and as many tensors, which at one row takes a
// third of the time of a small model's step.
//
// Owns: the order of a step's kernels from the embeddings to the last norm, the buffers between them. Must not know: how a
// kernel works, embeddings, logits.
// Called by: ../stack.py through ctypes. The same layer in Python is ropeway.model.decoder.DecoderLayer.

#include <algorithm>
#include <chrono>
#include <cstring>

#include "dispatch.h"
#include "threads.h"

namespace ropeway {
namespace {

struct Buffers {
    Scratch normed, qkv, attended, gate_up, gated, out, wanted_attended, wanted_residual;
    Scratch cos[kMaxRotaries], sin[kMaxRotaries];
};

// Seconds spent so far by kind of kernel: a few clock readings per layer, and a profile is there whenever it is asked for.
enum Kind { kLinear, kAttention, kRopeKv, kNorm, kGate, kKinds };
double spent[kKinds];

template <class Call>
void timed(Kind kind, const Call& call) {
    const auto began = std::chrono::steady_clock::now();
    call();
    spent[kind] += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

void* grow(Scratch& scratch, int64_t elements, Type type) { return scratch.get<char>(elements * size_of(type)); }

// Lines `ids` of a table, one after the other.
void* take(const void* table, const int64_t* ids, int64_t count, int64_t line_bytes, Scratch& scratch) {
    char* lines = scratch.get<char>(count * line_bytes);
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(lines + i * line_bytes, static_cast<const char*>(table) + ids[i] * line_bytes, line_bytes);
    return lines;
}

}  // namespace

EXPORT void ropeway_stack(const Stack* stack, const StackStep* step) {
    static Buffers buffers;
    const Stack& s = *stack;
    const Type type = static_cast<Type>(s.type);
    const int64_t hidden = s.hidden_size, inner = s.intermediate_size;
    const int64_t most = std::max(step->num_tokens, step->num_indices);  // a token may be wanted twice
    int64_t rows = step->num_tokens;
    const int64_t heads = s.num_heads * s.head_dim, all_heads = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim;
    const Kernels& plain = widest();
    const Kernels& by_head = fitting(s.head_dim, s.block_size);
    void* const normed = grow(buffers.normed, most * hidden, type);
    void* const qkv = grow(buffers.qkv, most * all_heads, type);
    void* attended = grow(buffers.attended, most * heads, type);
    void* const gate_up = grow(buffers.gate_up, most * 2 * inner, type);
    void* const gated = grow(buffers.gated, most * inner, type);
    void* const out = grow(buffers.out, most * hidden, type);
    void* residual = step->hidden;
    const int64_t angle_bytes = s.rotary_dim / 2 * static_cast<int64_t>(sizeof(float));
    const float *cos[kMaxRotaries], *sin[kMaxRotaries];  // [num_tokens, rotary_dim / 2]
    for (int r = 0; r < kMaxRotaries && s.cos[r] != nullptr; ++r) {
        cos[r] = static_cast<float*>(take(s.cos[r], step->positions, rows, angle_bytes, buffers.cos[r]));
        sin[r] = static_cast<float*>(take(s.sin[r], step->positions, rows, angle_bytes, buffers.sin[r]));
    }

    const auto linear = [&](const Linear& w, const void* x, void* y) {
        timed(kLinear, [&] { plain.linear(w, x, type, rows, w.in_features, y, type, w.out_features); });
    };
    const auto norm = [&](const void* x, void* residual, const float* weight, void* y) {
        timed(kNorm, [&] { plain.rms_norm(x, residual, weight, y, type, rows, hidden, s.eps); });
    };
    const auto norm_output = [&](const float* weight) {
        if (weight != nullptr) norm(out, nullptr, weight, out);
    };

    for (int64_t i = 0; i < s.num_layers; ++i) {
        const Layer& layer = s.layers[i];
        if (i == 0)
            norm(residual, nullptr, layer.attention_norm, normed);
        else
            norm(out, residual, layer.attention_norm, normed);
        linear(layer.qkv, normed, qkv);
        timed(kRopeKv, [&] {
            by_head.rope_kv({qkv, layer.kv, cos[layer.rotary], sin[layer.rotary], layer.q_norm, layer.k_norm,
                             step->slot_mapping, rows, s.block_stride, s.num_heads, s.num_kv_heads, s.head_dim,
                             s.rotary_dim, s.block_size, s.type, s.kv_type, s.eps});
        });
        timed(kAttention, [&] {
            by_head.attention({qkv, attended, layer.kv, all_heads, s.block_stride, step->query_start_loc, step->seq_lens,
                               step->block_table, step->max_blocks, step->num_reqs, s.num_heads, s.num_kv_heads,
                               s.head_dim, s.block_size, s.type, s.kv_type, layer.sliding_window, layer.scale,
                               layer.soft_cap});
        });
        if (i == s.num_layers - 1) {  // all keys and values are written: from here on only the wanted tokens matter
            rows = step->num_indices;
            if (rows == 0) return;
            attended = take(attended, step->indices, rows, heads * size_of(type), buffers.wanted_attended);
            residual = take(residual, step->indices, rows, hidden * size_of(type), buffers.wanted_residual);
        }
        linear(layer.out, attended, out);
        norm_output(layer.attention_out_norm);
        norm(out, residual, layer.mlp_norm, normed);
        linear(layer.gate_up, normed, gate_up);
        timed(kGate, [&] { plain.gated(gate_up, gated, type, rows, inner, static_cast<Gate>(s.gate)); });
        linear(layer.down, gated, out);
        norm_output(layer.mlp_out_norm);
    }
    norm(out, residual, s.norm, step->out);
}

EXPORT void ropeway_stack_seconds(double* seconds) { std::copy_n(spent, static_cast<int>(kKinds), seconds); }

}  // namespace ropeway
