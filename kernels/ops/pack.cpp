// Dense weights to panels and back (layout.h). Pure data movement apart from the conversion to bf16; threads share the panels.
#include <cstring>

#include "moe/c_api.h"
#include "moe/layout.h"
#include "moe/panel_rows.h"
#include "runtime/parallel.h"

namespace moe {
namespace {

struct Dense {
  int64_t rows, cols;
  int32_t gate_layout;

  bool gated() const { return gate_layout != MOE_UNGATED; }
  int64_t panels() const { return gated() ? w1_panels(rows / 2, true) : ceil_div(rows, kPanelCols); }
  int64_t row_of(int64_t panel, int64_t column) const { return dense_row(gate_layout, rows, panel, column); }
};

uint16_t to_bf16(float value) {
  uint32_t u;
  std::memcpy(&u, &value, sizeof u);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

template <class T>
uint16_t element(const T* from);
template <>
uint16_t element(const uint16_t* from) {
  return *from;
}
template <>
uint16_t element(const float* from) {
  return to_bf16(*from);
}

template <class T>
void pack_tile(const T* row, int64_t column, int64_t k, int64_t count, int64_t stride, uint16_t* tile) {
  for (int64_t i = 0; i < count; ++i) tile[(i / 2 * kTileCols + column) * 2 + i % 2] = element(row + (k + i) * stride);
}

// Rows of contiguous bf16: pairs move as one 32-bit word.
void pack_tile_pairs(const uint16_t* row, int64_t column, uint16_t* tile) {
  for (int pair = 0; pair < kStep / 2; ++pair) std::memcpy(tile + (pair * kTileCols + column) * 2, row + pair * 2, 4);
}

template <class T>
void pack_panel(const T* dense, const Dense& d, int64_t stride_row, int64_t stride_col, int64_t panel, uint16_t* packed) {
  const int64_t steps = steps_of(d.cols);
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t k = step * kStep, count = d.cols - k < kStep ? d.cols - k : kStep;
    uint16_t* const at = packed + step * kPanelStep;
    if (count < kStep) std::memset(at, 0, kPanelStep * 2);
    for (int64_t column = 0; column < kPanelCols; ++column) {
      uint16_t* const tile = at + column / kTileCols * kTileElements;
      const int64_t within = column % kTileCols, row = d.row_of(panel, column);
      if (row < 0) {
        for (int pair = 0; pair < kStep / 2; ++pair) std::memset(tile + (pair * kTileCols + within) * 2, 0, 4);
      } else if (sizeof(T) == 2 && stride_col == 1 && count == kStep) {
        pack_tile_pairs(reinterpret_cast<const uint16_t*>(dense) + row * stride_row + k, within, tile);
      } else {
        pack_tile(dense + row * stride_row, within, k, count, stride_col, tile);
      }
    }
  }
}

// `rows` is argument number `first`, `cols` the next one.
int32_t check(int64_t rows, int64_t cols, int32_t gate_layout, int64_t first, int64_t info[4]) {
  info[0] = 0;
  if (rows < 0 || (gate_layout != MOE_UNGATED && rows % 2)) info[0] = first;
  if (cols < 0) info[0] = first + 1;
  return info[0] ? MOE_BAD_ARGUMENT : MOE_OK;
}

}  // namespace
}  // namespace moe

int64_t moe_packed_elements(int64_t rows, int64_t cols, int32_t gate_layout) {
  return moe::Dense{rows, cols, gate_layout}.panels() * moe::panel_elements(cols);
}

int32_t moe_pack_expert(const void* dense, int32_t dtype, int64_t rows, int64_t cols, int64_t stride_row, int64_t stride_col, int32_t gate_layout,
                        uint16_t* packed, int32_t threads, int64_t info[4]) {
  const int32_t status = moe::check(rows, cols, gate_layout, 2, info);
  if (status != MOE_OK) return status;
  if (dtype != MOE_BF16 && dtype != MOE_F32) {
    info[0] = 1;
    return MOE_BAD_ARGUMENT;
  }
  const moe::Dense d{rows, cols, gate_layout};
  const int64_t size = moe::panel_elements(cols);
  moe::parallel(threads, [&](int rank, int team) {
    const moe::Share share = moe::share_of(d.panels(), rank, team);
    for (int64_t panel = share.begin; panel < share.end; ++panel) {
      if (dtype == MOE_BF16) {
        moe::pack_panel(static_cast<const uint16_t*>(dense), d, stride_row, stride_col, panel, packed + panel * size);
      } else {
        moe::pack_panel(static_cast<const float*>(dense), d, stride_row, stride_col, panel, packed + panel * size);
      }
    }
  });
  return MOE_OK;
}

int32_t moe_unpack_expert(const uint16_t* packed, int64_t rows, int64_t cols, int32_t gate_layout, uint16_t* dense, int32_t threads,
                          int64_t info[4]) {
  const int32_t status = moe::check(rows, cols, gate_layout, 1, info);
  if (status != MOE_OK) return status;
  const moe::Dense d{rows, cols, gate_layout};
  const int64_t size = moe::panel_elements(cols);
  moe::parallel(threads, [&](int rank, int team) {
    const moe::Share share = moe::share_of(d.panels(), rank, team);
    for (int64_t panel = share.begin; panel < share.end; ++panel) {
      for (int64_t column = 0; column < moe::kPanelCols; ++column) {
        const int64_t row = d.row_of(panel, column);
        if (row < 0) continue;
        const uint16_t* const tiles = packed + panel * size + column / moe::kTileCols * moe::kTileElements;
        for (int64_t k = 0; k < cols; ++k) {
          const int64_t step = k / moe::kStep, within = k % moe::kStep;
          dense[row * cols + k] = tiles[step * moe::kPanelStep + (within / 2 * moe::kTileCols + column % moe::kTileCols) * 2 + within % 2];
        }
      }
    }
  });
  return MOE_OK;
}
