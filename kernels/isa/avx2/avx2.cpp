// AVX2 and FMA: bf16 widened by shift and mask as in avx512.cpp, with sixteen registers.
//
// Registers: 4 rows x 2 accumulators of 8 columns, four for the even and odd values of k of those 16 columns, one broadcast activation. A block's 12
// rows and two tiles are walked four rows and one tile of one step at a time: with more steps, what is asked for ahead comes in too large bursts
// (bench/README.md).
#include "isa/lanes256.h"
#include "isa/bf16_by_rounding.h"
#include "generic/elementwise.h"
#include "generic/peak_operands.h"
#include "isa/ahead.h"
#include "isa/widen.h"

namespace moe {
namespace {

constexpr int kBlockRows = 12;
constexpr int kRegisterRows = 4;

// One step of kRows rows times one tile.
template <int kRows>
void walk(const float* a, const uint16_t* b, float* c, bool accumulate) {
  __m256 low[kRows], high[kRows];
  for (int r = 0; r < kRows; ++r) {
    low[r] = accumulate ? _mm256_loadu_ps(c + r * kPanelCols) : _mm256_setzero_ps();
    high[r] = accumulate ? _mm256_loadu_ps(c + r * kPanelCols + 8) : _mm256_setzero_ps();
  }
  const __m256i upper_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (int pair = 0; pair < kStep / 2; ++pair) {
    const __m256i* both = reinterpret_cast<const __m256i*>(b + pair * 2 * kTileCols);
    const __m256i first = _mm256_loadu_si256(both), second = _mm256_loadu_si256(both + 1);
    const __m256 low_even = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
    const __m256 low_odd = _mm256_castsi256_ps(_mm256_and_si256(first, upper_half));
    const __m256 high_even = _mm256_castsi256_ps(_mm256_slli_epi32(second, 16));
    const __m256 high_odd = _mm256_castsi256_ps(_mm256_and_si256(second, upper_half));
    for (int r = 0; r < kRows; ++r) {
      const __m256 even = _mm256_broadcast_ss(a + r * kStep + pair * 2);
      low[r] = _mm256_fmadd_ps(even, low_even, low[r]);
      high[r] = _mm256_fmadd_ps(even, high_even, high[r]);
      const __m256 odd = _mm256_broadcast_ss(a + r * kStep + pair * 2 + 1);
      low[r] = _mm256_fmadd_ps(odd, low_odd, low[r]);
      high[r] = _mm256_fmadd_ps(odd, high_odd, high[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    _mm256_storeu_ps(c + r * kPanelCols, low[r]);
    _mm256_storeu_ps(c + r * kPanelCols + 8, high[r]);
  }
}

void product(const BlockProduct& p) {
  const float* a = static_cast<const float*>(p.a);
  const uint16_t* b = p.b;
  Ahead ahead(p);
  for (int64_t s = 0; s < p.steps; ++s, a += p.rows * kStep, b += kPanelStep) {
    const bool accumulate = p.accumulate || s > 0;
    for (int tile = 0; tile < 2; ++tile) {
      ahead.quarter();
      ahead.quarter();
      const uint16_t* const b_tile = b + tile * kTileElements;
      for (int r = 0; r < p.rows; r += kRegisterRows) {
        const float* const a_rows = a + r * kStep;
        float* const c = p.c + r * kPanelCols + tile * kTileCols;
        switch (p.rows - r) {
          case 1:
            walk<1>(a_rows, b_tile, c, accumulate);
            break;
          case 2:
            walk<2>(a_rows, b_tile, c, accumulate);
            break;
          case 3:
            walk<3>(a_rows, b_tile, c, accumulate);
            break;
          default:
            walk<4>(a_rows, b_tile, c, accumulate);
            break;
        }
      }
    }
  }
}

void nothing() {}

int64_t peak_loop(int64_t iterations) {
  alignas(64) uint16_t operands[2 * kLanes];
  alignas(64) float c[8];
  random_bf16(operands, 2 * kLanes);
  constexpr int kChains = 12;
  __m256 sum[kChains] = {};
  const __m256 a = split(bf16_to_f32(load<U16>(operands))).low, b = split(bf16_to_f32(load<U16>(operands + kLanes))).low;
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      sum[j] = _mm256_fmadd_ps(sum[j], a, b);
      keep(sum[j]);
    }
  }
#pragma GCC unroll 12
  for (int j = 1; j < kChains; ++j) sum[0] = _mm256_add_ps(sum[0], sum[j]);
  _mm256_store_ps(c, sum[0]);
  consume(c);
  return iterations * kChains * 2 * 8;
}

}  // namespace

const KernelTable avx2_table = {"avx2",   kBlockRows, true,         0,         nothing, nothing, product, gather<float>,
                                activate, store_rows, weighted_sum, peak_loop, widen};

}  // namespace moe
