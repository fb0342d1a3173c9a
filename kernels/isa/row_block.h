// What the vector ISAs share: a block's row count becomes a template argument, so that its accumulators are registers.
#pragma once

#include "generic/lanes.h"
#include "moe/kernel_table.h"

namespace moe {
namespace {

template <int kRows>
inline void load_sums(F32 (&sum)[kRows][2], const BlockProduct& p) {
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < 2; ++t) sum[r][t] = p.accumulate ? load<F32>(p.c + r * kPanelCols + t * kTileCols) : F32{};
}

template <int kRows>
inline void store_sums(const F32 (&sum)[kRows][2], const BlockProduct& p) {
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < 2; ++t) store(p.c + r * kPanelCols + t * kTileCols, sum[r][t]);
}

// Kernel::run<rows>(p) for rows = 1 .. kMost.
template <class Kernel, int kMost>
void dispatch_rows(const BlockProduct& p) {
  if constexpr (kMost > 1) {
    if (p.rows < kMost) return dispatch_rows<Kernel, kMost - 1>(p);
  }
  Kernel::template run<kMost>(p);
}

}  // namespace
}  // namespace moe
