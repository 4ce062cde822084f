// Kernels for AVX2 with FMA and F16C. Compiled with those flags; called only where the processor has them.
#include "types.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vec_avx2.h"

#include "table.h"

namespace ropeway {
namespace {
constexpr Kernels table = make_table<Avx2>("avx2");
}
const Kernels* const kAvx2 = &table;
}  // namespace ropeway
#else
namespace ropeway {
const Kernels* const kAvx2 = nullptr;
}
#endif
