// Packed memory, the same for every ISA.
//
// A weight matrix [columns, k] (nn.Linear order: one row per output column) becomes panels of 32 output columns. A panel is two tiles side by side
// for every 32 values of k, so that whoever walks down k reads one sequential stream:
//
//   panel = [k / 32][2 tiles][16 pairs of k][16 columns][2 values of k]   bf16
//
// One tile is one AMX register: 16 rows of 64 bytes. In a gated w1 the left tile holds 16 gate columns and the right tile the 16 up columns of the
// same intermediate neurons, so the activation finds both halves in the block just computed. Columns and k are padded with zeros to 32.
//
// Activations are cut into blocks of a few rows with the same walk down k (rows = how many the block really holds, up to the ISA's block_rows):
//
//   block = [k / 32][rows][32 values of k]   bf16; rows of x in float32 for an ISA without bf16 products
//
// A block of one row is that row itself. Blocks of one expert follow each other without gaps.
#pragma once

#include <cstdint>

namespace moe {

constexpr int kStep = 32;       // values of k in one step: a tile's 64 bytes of bf16
constexpr int kTileCols = 16;   // output columns of one tile
constexpr int kPanelCols = 32;  // output columns of one panel
constexpr int kTileElements = kStep * kTileCols;
constexpr int kPanelStep = 2 * kTileElements;  // elements of one panel for one step of k

static constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
static constexpr int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

static constexpr int64_t steps_of(int64_t k) { return ceil_div(k, kStep); }
static constexpr int64_t panel_elements(int64_t k) { return steps_of(k) * kPanelStep; }

// Panels of a w1 with `intermediate` neurons. A gated one has 16 neurons a panel; their number is even because the neurons are the next GEMM's k.
static constexpr int64_t w1_panels(int64_t intermediate, bool gated) { return steps_of(intermediate) * (gated ? 2 : 1); }
static constexpr int64_t w2_panels(int64_t hidden) { return ceil_div(hidden, kPanelCols); }

}  // namespace moe
