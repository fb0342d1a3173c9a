// float32 to bf16 by VCVTNEPS2BF16: round_to_bf16 bit for bit, NaNs included, but for denormals, which it turns into zero, as
// the bf16 products of the ISAs with this instruction read them. A result below 2^-126 therefore becomes zero on these ISAs and not on the others.
#pragma once

#include "isa/lanes512.h"

namespace moe {
namespace {

inline U16 f32_to_bf16(F32 value) { return (U16)_mm512_cvtneps_pbh((__m512)value); }

}  // namespace
}  // namespace moe
