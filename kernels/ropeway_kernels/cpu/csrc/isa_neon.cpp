// Kernels for NEON, which every 64-bit ARM has.
#include "types.h"

#if defined(__aarch64__)
#include "vec_neon.h"

#include "table.h"

namespace ropeway {
namespace {
constexpr Kernels table = make_table<Neon>("neon");
}
const Kernels* const kNeon = &table;
}  // namespace ropeway
#else
namespace ropeway {
const Kernels* const kNeon = nullptr;
}
#endif
