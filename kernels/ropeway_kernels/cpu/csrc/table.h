// The table of kernels for one vector type. Included by each isa_*.cpp, once, after its vector type.
#pragma once

#if __has_include("attention.h")
#include "attention.h"
#define ATT &attention<V>
#else
#define ATT nullptr
#endif
#if __has_include("elementwise.h")
#include "elementwise.h"
#define ELE &rope_kv<V>, &rms_norm<V>, &gated<V>, &argmax<V>
#else
#define ELE nullptr,nullptr,nullptr,nullptr
#endif
#include "linear.h"

namespace ropeway {
namespace {

template <class V>
constexpr Kernels make_table(const char* name) {
    return {name, V::kLanes, V::kLanes * V::kPanelVectors, &linear<V>, ATT, ELE};
}

}  // namespace
}  // namespace ropeway
