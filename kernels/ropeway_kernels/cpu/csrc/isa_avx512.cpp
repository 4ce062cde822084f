// Kernels for AVX-512 (F, BW, DQ, VL). Compiled with those flags; called only where the processor has them.
#include "types.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "vec_avx512.h"

#include "table.h"

namespace ropeway {
namespace {
constexpr Kernels table = make_table<Avx512>("avx512");
}
const Kernels* const kAvx512 = &table;
}  // namespace ropeway
#else
namespace ropeway {
const Kernels* const kAvx512 = nullptr;
}
#endif
