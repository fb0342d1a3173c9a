// float32 to bf16 by VCVTNEPS2BF16: round_to_bf16 bit for bit, NaNs included, but for denormals, which it turns into zero. Where bf16 products read
// denormals as zero, as those of the ISAs with this instruction do, nobody can tell.
#pragma once

#include "isa/lanes512.h"

namespace moe {
namespace {

inline U16 f32_to_bf16(F32 value) { return (U16)_mm512_cvtneps_pbh((__m512)value); }

}  // namespace
}  // namespace moe
