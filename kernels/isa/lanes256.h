// What the vector extension cannot say, in AVX2, FMA and F16C: sixteen lanes are two registers.
#pragma once

#include <immintrin.h>

#include "generic/lanes.h"

namespace moe {
namespace {

struct Halves {
  __m256 low, high;
};
inline Halves split(F32 value) { return load<Halves>(reinterpret_cast<const float*>(&value)); }
inline F32 join(__m256 low, __m256 high) {
  const Halves halves{low, high};
  return load<F32>(reinterpret_cast<const float*>(&halves));
}

inline F32 fma(F32 a, F32 b, F32 c) {
  const Halves x = split(a), y = split(b), z = split(c);
  return join(_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high));
}
inline void stream(float* to, F32 value) {
  const Halves x = split(value);
  _mm256_stream_ps(to, x.low);
  _mm256_stream_ps(to + 8, x.high);
}
inline F32 f16_to_f32(U16 value) {
  const __m256i v = (__m256i)value;
  return join(_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
}
inline U16 f32_to_f16(F32 value) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const Halves x = split(value);
  return (U16)_mm256_set_m128i(_mm256_cvtps_ph(x.high, kNearest), _mm256_cvtps_ph(x.low, kNearest));
}

}  // namespace
}  // namespace moe
