// The chosen instruction set, for the files that call kernels without being one.
#pragma once

#include "types.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace ropeway {

const Kernels& widest();
// The widest set in which a vector divides both sizes.
const Kernels& fitting(int64_t a, int64_t b);

}  // namespace ropeway
