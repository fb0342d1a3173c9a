// bf16 rows for products that take float32.
#pragma once

#include "generic/lanes.h"

namespace moe {
namespace {

inline void widen(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, bf16_to_f32(load<U16>(from + i)));
}

}  // namespace
}  // namespace moe
