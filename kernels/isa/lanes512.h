// What the vector extension cannot say, in AVX-512.
#pragma once

#include <immintrin.h>

#include "generic/lanes.h"

namespace moe {
namespace {

constexpr __mmask16 kEvery = 0xffff;

inline F32 fma(F32 a, F32 b, F32 c) { return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline void stream(float* to, F32 value) { _mm512_stream_ps(to, (__m512)value); }
inline F32 f16_to_f32(U16 value) { return (F32)_mm512_maskz_cvtph_ps(kEvery, (__m256i)value); }
inline U16 f32_to_f16(F32 value) { return (U16)_mm512_maskz_cvtps_ph(kEvery, (__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

}  // namespace
}  // namespace moe
