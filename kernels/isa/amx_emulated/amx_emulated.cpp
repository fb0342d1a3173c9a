// The AMX loop nest on a bit-exact model of its tile instructions: a machine without AMX tests everything but the silicon.
#include "isa/lanes256.h"
#include "isa/bf16_by_rounding.h"
#include "generic/elementwise.h"
#include "generic/tile_model.h"
#include "generic/peak_operands.h"
#include "isa/flush_denormals.h"

namespace moe {
namespace {

int64_t peak_loop(int64_t iterations) {
  alignas(64) uint16_t a[16 * kStep], b[kPanelStep];
  alignas(64) float c[16 * kPanelCols];
  random_bf16(a, 16 * kStep);
  random_bf16(b, kPanelStep);
  BlockProduct p{a, b, c, 16, 1, false, nullptr, 0};
  for (int64_t i = 0; i < iterations; ++i, p.accumulate = true) model_product(p);
  consume(c);
  return iterations * 2 * 16 * kPanelCols * kStep;
}

}  // namespace

const KernelTable amx_emulated_table = {
    "amx_emulated", 32, false, 0, flush_denormals, keep_denormals, model_product, gather<uint16_t>, activate, store_rows, weighted_sum, peak_loop};

}  // namespace moe
