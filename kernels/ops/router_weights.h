// One router weight as float32, from whichever dtype and strides the caller has.
#pragma once

#include <cstdint>
#include <cstring>

#include "moe/c_api.h"

namespace moe {

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Avoids denormal float32 on the way: MXCSR may say that they are zero.
inline float f16_to_f32(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
  if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * static_cast<float>(mantissa);
  return float_of(sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | mantissa << 13);
}

inline float weight_at(const moe_layer_args& a, int64_t token, int64_t slot) {
  if (!a.topk_weights) return 1.0f;
  const int64_t at = token * a.weights_stride_token + slot * a.weights_stride_slot;
  if (a.weights_dtype == MOE_F32) return static_cast<const float*>(a.topk_weights)[at];
  const uint16_t half = static_cast<const uint16_t*>(a.topk_weights)[at];
  return a.weights_dtype == MOE_BF16 ? float_of(uint32_t{half} << 16) : f16_to_f32(half);
}

}  // namespace moe
