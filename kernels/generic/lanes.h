// Sixteen lanes of float32: the arithmetic that all element-wise passes are written in.
//
// Operators come from the compiler's vector extension, so one source becomes one 512-bit or two 256-bit instructions. An ISA supplies what the
// extension cannot say, fma and the 16-bit conversions, in its own lanes header, which includes this one. Everything has internal linkage: a copy
// compiled for one ISA must never serve another. With -ffp-contract=off the same source gives the same bits on every ISA.
#pragma once

#include <cstdint>
#include <cstring>

#include "moe/c_api.h"
#include "moe/layout.h"

namespace moe {
namespace {

constexpr int kLanes = 16;
typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));

inline F32 splat(float value) { return F32{} + value; }
inline U32 bits_of(F32 value) { return reinterpret_cast<U32>(value); }
inline F32 float_of(U32 value) { return reinterpret_cast<F32>(value); }

template <class V, class T>
inline V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}
template <class V, class T>
inline void store(T* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}
// The first `count` elements; the others read as zero, or are left alone.
template <class V, class T>
inline V load_first(const T* from, int64_t count) {
  V value{};
  std::memcpy(&value, from, static_cast<size_t>(count) * sizeof(T));
  return value;
}
template <class V, class T>
inline void store_first(T* to, V value, int64_t count) {
  std::memcpy(to, &value, static_cast<size_t>(count) * sizeof(T));
}

inline F32 bf16_to_f32(U16 value) { return float_of(__builtin_convertvector(value, U32) << 16); }

// Round to nearest even. A NaN stays a NaN: its low payload bits must not round it to infinity.
inline U16 round_to_bf16(F32 value) {
  const U32 u = bits_of(value);
  const U32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U32 quiet = (u >> 16) | 0x40u;
  const U32 is_nan = reinterpret_cast<U32>((u & 0x7fffffffu) > 0x7f800000u);
  return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), U16);
}

// Comparisons with NaN are false, so both keep a NaN in `value`.
inline F32 at_most(F32 value, F32 limit) { return value > limit ? limit : value; }
inline F32 at_least(F32 value, F32 limit) { return value < limit ? limit : value; }
inline F32 magnitude(F32 value) { return float_of(bits_of(value) & 0x7fffffffu); }

}  // namespace
}  // namespace moe
