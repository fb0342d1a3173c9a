// Sizes of blocks and tasks: pure functions of the problem and the machine. None of them changes a result: a sum over k goes through float32 memory
// unrounded wherever it is cut, so any choice gives the same bits.
#pragma once

#include <cstdint>

#include "moe/layout.h"

namespace moe {

struct Machine {
  int threads;
  int64_t l2_bytes;  // of one core
};

// Most rows one task takes: panels are streamed from memory once per that many rows, and the rows must stay in L2.
constexpr int64_t kMostTaskRows = 256;
// Panels whose float32 sums wait in L2 while blocks of k pass by.
constexpr int64_t kGroupPanels = 8;

// Rows of one task: the expert's rows in equal parts, each whole blocks.
int64_t task_rows(int64_t expert_rows, int block_rows);

// Steps of k that `rows` rows are multiplied by before the next panel's turn: as many as keep them in half of L2.
int64_t k_block_steps(int64_t rows, int64_t steps, int64_t element_bytes, const Machine& machine);

// What one panel costs a task of `rows` rows, in units of one block's step: the panel arrives from memory at the price of about eight block products.
int64_t panel_cost(int64_t rows, int64_t steps, int block_rows);

// Panels of one task so that `total_cost` becomes about eight tasks a thread: enough that the last ones to finish do not matter.
int64_t task_panels(int64_t total_cost, int64_t cost, int64_t panels, const Machine& machine);

// Threads worth waking for that many bytes of weights and floating-point operations.
int useful_threads(int64_t bytes, int64_t flops, int threads);

// Whether an intermediate result of that many bytes leaves the caches before it is read, so that storing past them saves reading its lines first. Two
// hyper-threads share an L2.
bool worth_streaming(int64_t bytes, const Machine& machine);

// The second product's unreduced rows wait in memory for the weighted sum. Large ones are cut into slices of columns, two of which are alive at a
// time.
struct Slices {
  int64_t count, panels;  // the last slice may have fewer panels
  int64_t alive() const { return count > 1 ? 2 : 1; }
};
Slices column_slices(int64_t rows, int64_t hidden);

}  // namespace moe
