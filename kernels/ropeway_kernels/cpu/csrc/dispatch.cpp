// The library's C interface: picks the instruction set at run time and passes calls on. No vector code here: this file
// is compiled for the plainest processor of the family.
//
// Owns: what the processor has, the choice of the set, packing. Must not know: torch, Python.
// Called by: ../__init__.py through ctypes, from one thread at a time.

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "dispatch.h"
#include "threads.h"

namespace ropeway {
namespace {

constexpr int kMaxSets = 5;
const Kernels* chain[kMaxSets + 1];  // usable sets, the widest first; ends with null

bool supported(const Kernels* set) {
    if (set == nullptr) return false;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (set == kAvx512 || set == kAvx512Bf16) {
        const bool plain = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        return plain && (set == kAvx512 || __builtin_cpu_supports("avx512bf16"));
    }
    if (set == kAvx2) return avx2;
#endif
    return true;  // NEON is part of every aarch64; scalar code runs anywhere
}

int64_t step_of(int32_t type) { return static_cast<Type>(type) == Type::kBf16 ? 2 : 1; }

template <class T>
void pack(const T* weight, int64_t stride, const Linear& to) {
    T* packed = const_cast<T*>(static_cast<const T*>(to.packed));
    const int64_t step = step_of(to.type), panel = to.panel, k = to.in_features;
    parallel_for((to.out_features + panel - 1) / panel, [&](int64_t p) {
        T* out = packed + p * panel * k;
        for (int64_t column = 0; column < panel; ++column) {
            const int64_t n = p * panel + column;
            for (int64_t i = 0; i < k; i += step)
                for (int64_t s = 0; s < step; ++s)
                    out[i * panel + column * step + s] = n < to.out_features ? weight[n * stride + i + s] : T{};
        }
    });
}

template <class T>
void unpack_row(const Linear& from, int64_t n, T* row) {
    const int64_t step = step_of(from.type), panel = from.panel;
    const T* packed = static_cast<const T*>(from.packed) + n / panel * panel * from.in_features + n % panel * step;
    for (int64_t i = 0; i < from.in_features; i += step)
        for (int64_t s = 0; s < step; ++s) row[i + s] = packed[i * panel + s];
}

}  // namespace

const Kernels& widest() { return *chain[0]; }

const Kernels& fitting(int64_t a, int64_t b) {
    const Kernels* const* set = chain;
    while (set[1] != nullptr && (a % (*set)->lanes != 0 || b % (*set)->lanes != 0)) ++set;
    return **set;
}

// Chooses the sets from `name` (null: the widest) downwards. Returns the chosen set's name; null if this build or this
// processor lacks it.
EXPORT const char* ropeway_select(const char* name) {
    const Kernels* const all[kMaxSets] = {kAvx512Bf16, kAvx512, kAvx2, kNeon, kScalar};
    int count = 0;
    for (const Kernels* set : all) {
        if (!supported(set)) continue;
        if (count == 0 && name != nullptr && std::strcmp(name, set->name) != 0) continue;
        chain[count++] = set;
    }
    chain[count] = nullptr;
    return count == 0 ? nullptr : chain[0]->name;
}

// Whether the processor has a feature beside its sets; `name` is Linux's.
EXPORT int32_t ropeway_has_feature(const char* name) {
    [[maybe_unused]] const auto asked = [name](const char* feature) { return std::strcmp(name, feature) == 0; };
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (asked("avx512_vnni")) return supported(kAvx512) && __builtin_cpu_supports("avx512vnni");
    if (asked("avx_vnni")) {  // not every compiler's __builtin_cpu_supports knows it
        unsigned a = 0, b = 0, c = 0, d = 0;
        return supported(kAvx2) && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
    }
#elif defined(__aarch64__) && defined(__linux__)
    if (asked("asimddp")) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
    return false;
}

EXPORT int32_t ropeway_panel() { return chain[0]->panel; }

EXPORT void ropeway_set_num_threads(int32_t count) { set_num_threads(count); }

// weight: [out_features, in_features], rows `stride` elements apart; to.packed receives it.
EXPORT void ropeway_pack(const void* weight, int64_t stride, const Linear* to) {
    if (static_cast<Type>(to->type) == Type::kF32)
        pack(static_cast<const float*>(weight), stride, *to);
    else
        pack(static_cast<const bf16*>(weight), stride, *to);
}

// rows[i] = the weights of output ids[i]; ids must be in range. So a tied embedding needs no second table.
EXPORT void ropeway_unpack_rows(const Linear* from, const int64_t* ids, int64_t count, void* rows) {
    parallel_for((count + 15) / 16, [&](int64_t chunk) {
        for (int64_t i = chunk * 16; i < std::min(count, chunk * 16 + 16); ++i) {
            if (static_cast<Type>(from->type) == Type::kF32)
                unpack_row(*from, ids[i], static_cast<float*>(rows) + i * from->in_features);
            else
                unpack_row(*from, ids[i], static_cast<bf16*>(rows) + i * from->in_features);
        }
    });
}

EXPORT void ropeway_linear(const Linear* w, const void* x, int32_t x_type, int64_t rows, int64_t x_stride, void* y,
                           int32_t y_type, int64_t y_stride) {
    chain[0]->linear(*w, x, static_cast<Type>(x_type), rows, x_stride, y, static_cast<Type>(y_type), y_stride);
}

EXPORT void ropeway_attention(const Attention* a) { fitting(a->head_dim, a->block_size).attention(*a); }

EXPORT void ropeway_rope_kv(const RopeKv* a) { fitting(a->head_dim, a->block_size).rope_kv(*a); }

EXPORT void ropeway_rms_norm(const void* x, void* residual, const float* weight, void* out, int32_t type, int64_t rows,
                             int64_t size, float eps) {
    chain[0]->rms_norm(x, residual, weight, out, static_cast<Type>(type), rows, size, eps);
}

EXPORT void ropeway_rms_norm_int8(const void* x, void* residual, const float* weight, int8_t* out, float* scales,
                                  int32_t type, int64_t rows, int64_t size, float eps) {
    chain[0]->rms_norm_int8(x, residual, weight, out, scales, static_cast<Type>(type), rows, size, eps);
}

EXPORT void ropeway_gated(const void* x, void* out, int32_t type, int64_t rows, int64_t size, int32_t gate) {
    chain[0]->gated(x, out, static_cast<Type>(type), rows, size, static_cast<Gate>(gate));
}

EXPORT void ropeway_argmax(const float* x, int64_t rows, int64_t size, int64_t stride, float* value, int64_t* index) {
    chain[0]->argmax(x, rows, size, stride, value, index);
}

EXPORT void ropeway_penalise(const Penalise* a) { chain[0]->penalise(*a); }

EXPORT void ropeway_sample(const Sample* a) { chain[0]->sample(*a); }

EXPORT double ropeway_peak(int64_t iterations) { return chain[0]->peak(iterations); }

EXPORT double ropeway_read_rate(const void* memory, int64_t size) { return chain[0]->read_rate(memory, size); }

}  // namespace ropeway
