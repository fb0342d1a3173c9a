// float32 to bf16 where no instruction does it.
#pragma once

#include "generic/lanes.h"

namespace moe {
namespace {

inline U16 f32_to_bf16(F32 value) { return round_to_bf16(value); }

}  // namespace
}  // namespace moe
