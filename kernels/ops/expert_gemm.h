// One expert's rows times some of its panels: the loop nest around the ISA's block product.
//
//   for a group of panels, for a block of k, for a panel, for a block of rows: product
//
// Rows of one task stay in L2 while its panels stream past; a block of k is as long as that allows. With a single block of k the sums leave at once
// through a 4 KiB buffer, else they wait in float32 for the next block.
#pragma once

#include "moe/kernel_table.h"
#include "moe/layout.h"
#include "runtime/blocking.h"

namespace moe {

// Where a thread's next task begins to read panels: fetched while the last panel of the present one is multiplied.
struct Following {
  const uint16_t* panels = nullptr;
  int64_t bytes = 0;
};

// Some steps of all of a task's rows, in blocks.
struct HeldRows {
  const char* rows;
  int64_t first, steps;
};

struct ExpertGemm {
  const KernelTable* table;
  int64_t rows, block_rows, steps;
  const uint16_t* panels;  // the matrix's first panel
  int64_t first, last;     // panels of this task
  int64_t k_block;         // steps
  float* sums;             // room for sums_elements()
  Following following;     // what the thread's next task reads first

  int64_t element_bytes() const { return table->f32_blocks ? 4 : 2; }
};

// float32 values of the sums of a task of at most `rows` rows. Tiles are stored whole, so there is room for the ISA's largest block in every block.
inline int64_t sums_elements(const KernelTable& table, int64_t rows, int64_t block_rows) {
  return kGroupPanels * ceil_div(rows, block_rows) * table.block_rows * kPanelCols;
}

// hold(step, steps) returns rows that have these steps at least; it is asked before every block of k. finish(panel, first_row, rows, sums) receives
// every finished block, [rows][32].
template <class Hold, class Finish>
void run(const ExpertGemm& g, Hold&& hold, Finish&& finish) {
  const int64_t block_rows = g.block_rows, blocks = ceil_div(g.rows, block_rows), panel_size = g.steps * kPanelStep;
  const int64_t block_sums = g.table->block_rows * kPanelCols;
  const bool single = g.k_block >= g.steps;
  const int64_t following_bytes = round_up(ceil_div(g.following.bytes, blocks), 64);
  for (int64_t group = g.first; group < g.last; group += kGroupPanels) {
    const int64_t group_end = group + kGroupPanels < g.last ? group + kGroupPanels : g.last;
    for (int64_t step = 0; step < g.steps; step += g.k_block) {
      const int64_t steps = g.steps - step < g.k_block ? g.steps - step : g.k_block;
      const bool last_k = step + steps == g.steps;
      const HeldRows held = hold(step, steps);
      for (int64_t panel = group; panel < group_end; ++panel) {
        const uint16_t* const b = g.panels + panel * panel_size + step * kPanelStep;
        const int64_t ahead_bytes = round_up(ceil_div(steps * kPanelStep * 2, blocks), 64);
        const bool more = panel + 1 < g.last;
        for (int64_t block = 0; block < blocks; ++block) {
          const int64_t first_row = block * block_rows;
          const int rows = static_cast<int>(g.rows - first_row < block_rows ? g.rows - first_row : block_rows);
          const char* const a = held.rows + (first_row * held.steps + (step - held.first) * rows) * kStep * g.element_bytes();
          float* const sums = single ? g.sums : g.sums + ((panel - group) * blocks + block) * block_sums;
          Following next{more ? b + panel_size : last_k ? g.following.panels : nullptr, more ? ahead_bytes : following_bytes};
          if (next.panels) next.panels += block * next.bytes / 2;
          g.table->product({a, b, sums, rows, steps, step > 0, next.panels, next.bytes});
          if (last_k) finish(panel, first_row, rows, sums);
        }
      }
    }
  }
}

}  // namespace moe
