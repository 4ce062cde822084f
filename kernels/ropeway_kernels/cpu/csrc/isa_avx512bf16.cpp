// Kernels for AVX-512 with its bf16 dot product. Compiled with those flags; called only where the processor has them.
#include "types.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BF16__)
#include "vec_avx512.h"

#include "table.h"

namespace ropeway {
namespace {
constexpr Kernels table = make_table<Avx512Bf16>("avx512bf16");
}
const Kernels* const kAvx512Bf16 = &table;
}  // namespace ropeway
#else
namespace ropeway {
const Kernels* const kAvx512Bf16 = nullptr;
}
#endif
