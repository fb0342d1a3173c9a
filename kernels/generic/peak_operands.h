// Operands for the peak loops: random, since products of zeros toggle no wires and run faster.
#pragma once

#include <cstdint>

namespace moe {
namespace {

// bf16 in [-1, 1): xorshift64 bits in the mantissa and sign, exponent of numbers in [0.5, 1).
inline void random_bf16(uint16_t* to, int count) {
  uint64_t state = 0x9e3779b97f4a7c15u;
  for (int i = 0; i < count; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    to[i] = static_cast<uint16_t>(0x3f00u | (state & 0x807fu));
  }
}

// Makes the compiler believe that `data` is read.
inline void consume(const void* data) { asm volatile("" : : "r"(data) : "memory"); }

// Makes it believe that `value` is changed, in the vector register where it is: chains of the same products stay several, and out of memory.
template <class Vector>
inline void keep(Vector& value) {
  asm volatile("" : "+v"(value));
}

}  // namespace
}  // namespace moe
