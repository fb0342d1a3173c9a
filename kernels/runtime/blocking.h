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

// Most rows one task takes: panels are streamed from memory once per that many rows, and the rows must stay in L2. Where experts have 256 rows on
// average, half of them have a few more, and two tasks of half as many rows read every panel twice; hence a quarter more. Float32 rows take twice the
// space: 300 of them were slower in one task than in two (bench/notebook/ice-lake-variants.md).
constexpr int64_t kMostTaskRows = 320, kMostF32TaskRows = 256;
// Panels whose float32 sums wait in L2 while blocks of k pass by.
constexpr int64_t kGroupPanels = 8;

// A task takes at most `task` rows, a multiple of `block`.
struct RowLimits {
  int block;
  int64_t task;
};

// Rows of one task: the expert's rows in equal parts, each whole blocks.
int64_t task_rows(int64_t expert_rows, const RowLimits& limits);

// Steps of k that `rows` rows are multiplied by before the next panel's turn: as many as keep them in `cached_bytes`, to less than a step.
int64_t k_block_steps(int64_t rows, int64_t steps, int64_t element_bytes, int64_t cached_bytes);

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
constexpr int64_t kMostSlices = 16;
// At least `least` slices, as far as there are panels, and more for many rows; kMostSlices at most.
Slices column_slices(int64_t rows, int64_t hidden, int64_t least);

// How a call's work is cut. What is cut finer needs less memory; what does not fit is cut finer still.
struct Cut {
  RowLimits rows;
  int64_t cached_bytes;  // of a task's rows, while panels stream past
  bool whole;  // a thread holds a task's rows with all of their k, or only as much as is cached
  int threads;
};

// Notch 0 is as coarse as the machine likes. Each of the next ones halves the rows that a thread works on; those after that, the threads. Rows in
// float32 are held whole down to 64 of them, then no longer: products of float32 are so slow that bringing a block of k again for every group of
// panels costs them less than meeting every panel with fewer rows. Those of bf16 are not.
constexpr int kFinestRows = 8;  // halvings down to single rows
constexpr int kWholeRows = 2;  // halvings down to 64
Cut cut_at(int notch, int64_t tokens, int block_rows, bool f32_blocks, const Machine& machine);

// What a call may work in: 64 MiB, and for every pair of a token and an expert a bf16 row of both products.
int64_t memory_promised(int64_t pairs, int64_t hidden, int64_t intermediate);

}  // namespace moe
