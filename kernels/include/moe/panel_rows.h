// Which row of a dense matrix stands behind a panel's column (layout.h).
#pragma once

#include <cstdint>

#include "moe/c_api.h"
#include "moe/layout.h"

namespace moe {

// `rows` is the dense matrix's; the result is -1 for a padding column. In a gated matrix the left tile holds gate rows, the right one up rows.
static inline int64_t dense_row(int32_t gate_layout, int64_t rows, int64_t panel, int64_t column) {
  if (gate_layout == MOE_UNGATED) {
    const int64_t row = panel * kPanelCols + column;
    return row < rows ? row : -1;
  }
  const int64_t neuron = panel * kTileCols + column % kTileCols, up = column / kTileCols;
  if (neuron >= rows / 2) return -1;
  return gate_layout == MOE_CONCATENATED ? up * (rows / 2) + neuron : 2 * neuron + up;
}

}  // namespace moe
