// The table of kernels for one vector type. Included by each isa_*.cpp, once, after its vector type.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "probe.h"
#include "sampling.h"

namespace ropeway {
namespace {

template <class V>
constexpr Kernels make_table(const char* name) {
    return {name,         V::kLanes,         V::kLanes * V::kPanelVectors, &linear<V>, &attention<V>, &rope_kv<V>,
            &rms_norm<V>, &rms_norm_int8<V>, &gated<V>,                    &argmax<V>, &penalise<V>,  &sample<V>,
            &peak<V>,     &read_rate<V>};
}

}  // namespace
}  // namespace ropeway
