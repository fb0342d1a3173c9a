// The AMX bf16 product in plain lanes, equal to TDPBF16PS bit for bit (Intel SDM, TDPBF16PS: for every row and column one chain of fused
// multiply-adds over the even values of k and one over the odd values, both from zero, then even + odd added to the accumulator; denormals read and
// written as zero). The caller sets MXCSR's FTZ and DAZ.
#pragma once

#include "moe/kernel_table.h"

namespace moe {
namespace {

template <int kRows>
inline void model_rows(const uint16_t* a, int64_t a_step, const uint16_t* b, float* c, int64_t steps, bool accumulate) {
  F32 sum[kRows][2];
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < 2; ++t) sum[r][t] = accumulate ? load<F32>(c + r * kPanelCols + t * kTileCols) : F32{};
  for (int64_t s = 0; s < steps; ++s, a += a_step, b += kPanelStep) {
    F32 even[kRows][2] = {}, odd[kRows][2] = {};
#pragma GCC unroll 4
    for (int pair = 0; pair < kStep / 2; ++pair) {
      F32 b_even[2], b_odd[2];
      for (int t = 0; t < 2; ++t) {
        const U32 both = load<U32>(b + t * kTileElements + pair * 2 * kTileCols);
        b_even[t] = float_of(both << 16);
        b_odd[t] = float_of(both & 0xffff0000u);
      }
      for (int r = 0; r < kRows; ++r) {
        uint32_t both;
        std::memcpy(&both, a + r * kStep + pair * 2, sizeof both);
        const U32 lanes = U32{} + both;
        const F32 a_even = float_of(lanes << 16), a_odd = float_of(lanes & 0xffff0000u);
        for (int t = 0; t < 2; ++t) {
          even[r][t] = fma(a_even, b_even[t], even[r][t]);
          odd[r][t] = fma(a_odd, b_odd[t], odd[r][t]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < 2; ++t) sum[r][t] = sum[r][t] + (even[r][t] + odd[r][t]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < 2; ++t) store(c + r * kPanelCols + t * kTileCols, sum[r][t]);
}

// Four rows at a time: 8 even and 8 odd chains, 8 sums and the operands fit in 32 registers.
inline void model_product(const BlockProduct& p) {
  const uint16_t* a = static_cast<const uint16_t*>(p.a);
  const int64_t a_step = int64_t{p.rows} * kStep;
  int row = 0;
  for (; p.rows - row >= 4; row += 4) model_rows<4>(a + row * kStep, a_step, p.b, p.c + row * kPanelCols, p.steps, p.accumulate);
  const uint16_t* rest = a + row * kStep;
  float* c = p.c + row * kPanelCols;
  switch (p.rows - row) {
    case 3:
      return model_rows<3>(rest, a_step, p.b, c, p.steps, p.accumulate);
    case 2:
      return model_rows<2>(rest, a_step, p.b, c, p.steps, p.accumulate);
    case 1:
      return model_rows<1>(rest, a_step, p.b, c, p.steps, p.accumulate);
    default:
      return;
  }
}

}  // namespace
}  // namespace moe
