// MXCSR for ISAs whose bf16 products treat denormals as zero whatever MXCSR says: their vector paths must do the same to give the same bits.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moe {
namespace {

constexpr unsigned kFlushAndZero = 0x8040;  // FTZ | DAZ
thread_local unsigned saved_mxcsr = 0;

inline void flush_denormals() {
  saved_mxcsr = _mm_getcsr();
  _mm_setcsr(saved_mxcsr | kFlushAndZero);
}
inline void keep_denormals() { _mm_setcsr(saved_mxcsr); }

}  // namespace
}  // namespace moe
