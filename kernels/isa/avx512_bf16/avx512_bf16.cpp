// AVX512-BF16: VDPBF16PS, two bf16 products a lane.
//
// Registers: 12 rows x 2 accumulators = 24, two for the panel's tiles; the activation pair comes from memory as a broadcast operand. 14 loads for 24
// products keep both load ports below the products' rate, and 24 chains hide their latency (6 cycles at two a cycle needs 12).
// One row alone has two chains only: it takes two panels' worth of latency and still outruns memory.
#include "isa/bf16_by_instruction.h"
#include "generic/elementwise.h"
#include "generic/peak_operands.h"
#include "isa/ahead.h"
#include "isa/row_block.h"

namespace moe {
namespace {

constexpr int kBlockRows = 12;

struct Bf16Pairs {
  template <int kRows>
  static void run(const BlockProduct& p) {
    F32 sum[kRows][2];
    load_sums<kRows>(sum, p);
    const uint16_t *a = static_cast<const uint16_t*>(p.a), *b = p.b;
    Ahead ahead(p);
    for (int64_t s = 0; s < p.steps; ++s, a += kRows * kStep, b += kPanelStep) {
#pragma GCC unroll 4
      for (int pair = 0; pair < kStep / 2; ++pair) {
        if (pair % 4 == 0) ahead.quarter();
        const __m512bh left = (__m512bh)load<U32>(b + pair * 2 * kTileCols);
        const __m512bh right = (__m512bh)load<U32>(b + kTileElements + pair * 2 * kTileCols);
        for (int r = 0; r < kRows; ++r) {
          int32_t both;
          std::memcpy(&both, a + r * kStep + pair * 2, sizeof both);
          const __m512bh lanes = (__m512bh)_mm512_set1_epi32(both);
          sum[r][0] = (F32)_mm512_dpbf16_ps((__m512)sum[r][0], lanes, left);
          sum[r][1] = (F32)_mm512_dpbf16_ps((__m512)sum[r][1], lanes, right);
        }
      }
    }
    store_sums<kRows>(sum, p);
  }
};

void nothing() {}

int64_t peak_loop(int64_t iterations) {
  alignas(64) uint16_t operands[2 * kTileElements];
  alignas(64) float c[kLanes];
  random_bf16(operands, 2 * kTileElements);
  constexpr int kChains = 16;
  __m512 sum[kChains] = {};
  const __m512bh a = (__m512bh)load<U32>(operands), b = (__m512bh)load<U32>(operands + 32);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) {
      sum[j] = _mm512_dpbf16_ps(sum[j], a, b);
      keep(sum[j]);
    }
  }
#pragma GCC unroll 16
  for (int j = 1; j < kChains; ++j) sum[0] = _mm512_add_ps(sum[0], sum[j]);
  _mm512_store_ps(c, sum[0]);
  consume(c);
  return iterations * kChains * 4 * kLanes;
}

}  // namespace

const KernelTable avx512_bf16_table = {
    "avx512_bf16", kBlockRows, false,        0,        nothing, nothing, dispatch_rows<Bf16Pairs, kBlockRows>, gather<uint16_t>,
    activate,      store_rows, weighted_sum, peak_loop};

}  // namespace moe
