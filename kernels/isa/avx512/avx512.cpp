// AVX-512 without bf16 instructions (Skylake to Ice Lake): bf16 is the upper half of a float32, so a shift and a mask turn a register of pairs into
// two registers of float32 factors, and fused multiply-adds do the rest.
//
// Registers: 12 rows x 2 accumulators = 24, four for the panel's even and odd values of k, and for both tiles a factor from the activation block,
// which holds float32.
#include "isa/lanes512.h"
#include "isa/bf16_by_rounding.h"
#include "generic/elementwise.h"
#include "generic/peak_operands.h"
#include "isa/ahead.h"
#include "isa/widen.h"
#include "isa/row_block.h"

namespace moe {
namespace {

constexpr int kBlockRows = 12;

struct Widened {
  template <int kRows>
  static void run(const BlockProduct& p) {
    F32 sum[kRows][2];
    load_sums<kRows>(sum, p);
    const float* a = static_cast<const float*>(p.a);
    const uint16_t* b = p.b;
    Ahead ahead(p);
    for (int64_t s = 0; s < p.steps; ++s, a += kRows * kStep, b += kPanelStep) {
#pragma GCC unroll 1
      for (int pair = 0; pair < kStep / 2; ++pair) {
        if (pair % 4 == 0) ahead.quarter();
        const U32 left = load<U32>(b + pair * 2 * kTileCols), right = load<U32>(b + kTileElements + pair * 2 * kTileCols);
        const F32 even[2] = {float_of(left << 16), float_of(right << 16)};
        const F32 odd[2] = {float_of(left & 0xffff0000u), float_of(right & 0xffff0000u)};
        // Both tiles for a row, then the next row: a factor for all rows at once would push sums out of the registers.
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          multiply(sum[r], a + r * kStep + pair * 2, even);
          multiply(sum[r], a + r * kStep + pair * 2 + 1, odd);
        }
      }
    }
    store_sums<kRows>(sum, p);
  }
  static void multiply(F32 (&sum)[2], const float* a, const F32 (&b)[2]) {
    const F32 factor = (F32)_mm512_set1_ps(*a);
    sum[0] = fma(factor, b[0], sum[0]);
    sum[1] = fma(factor, b[1], sum[1]);
  }
};

void nothing() {}

int64_t peak_loop(int64_t iterations) {
  alignas(64) uint16_t operands[2 * kLanes];
  alignas(64) float c[kLanes];
  random_bf16(operands, 2 * kLanes);
  constexpr int kChains = 16;
  F32 sum[kChains] = {};
  const F32 a = bf16_to_f32(load<U16>(operands)), b = bf16_to_f32(load<U16>(operands + kLanes));
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) {
      sum[j] = fma(sum[j], a, b);
      keep(sum[j]);
    }
  }
#pragma GCC unroll 16
  for (int j = 1; j < kChains; ++j) sum[0] += sum[j];
  store(c, sum[0]);
  consume(c);
  return iterations * kChains * 2 * kLanes;
}

}  // namespace

const KernelTable avx512_table = {"avx512", kBlockRows, true,         0,         nothing, nothing, dispatch_rows<Widened, kBlockRows>, gather<float>,
                                  activate, store_rows, weighted_sum, peak_loop, widen};

}  // namespace moe
