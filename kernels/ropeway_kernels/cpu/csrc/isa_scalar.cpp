// Kernels for any processor: the last resort, and a yardstick for the others.
#include "types.h"
#include "vec_scalar.h"

#include "table.h"

namespace ropeway {
namespace {
constexpr Kernels table = make_table<Scalar>("scalar");
}
const Kernels* const kScalar = &table;
}  // namespace ropeway
