// One layer call before any work is done: how it is cut, the memory it works in, and the order of its tasks.
//
// Memory: routing and counters | h, the activation's output, in bf16 | the unreduced rows of two slices, in float32 | what every thread holds. The
// first two follow from the sizes. How finely the last two are cut is chosen so that all of it keeps memory_promised().
#pragma once

#include "moe/c_api.h"
#include "moe/kernel_table.h"
#include "ops/expert_gemm.h"
#include "ops/schedule.h"

namespace moe {

// What one thread holds. On lines of its own: it writes here while others work.
struct alignas(64) Hand {
  char* a;                 // rows of one task in the form that products take, or one block of k of them
  float* sums;
  const float** sum_rows;  // [topk]
  float* sum_weights;      // [topk]
  const void* held_rows;   // what `a` holds: where these rows come from, null = nothing, ...
  int64_t held_step;       // ... and the first step of them
};

// A task by its position in the schedule.
struct Place {
  TaskKind kind;
  int32_t slice;
  int64_t index;        // among the tasks of its phase
  ProductTask product;  // of kFirst and kSecond
};

struct Layer {
  const moe_layer_args& args;
  const KernelTable& table;
  Machine machine;
  bool gated;
  int64_t w1_count, w2_count, k_steps, i_steps;  // panels of w1 and w2; steps of their k
  int64_t pairs;
  Cut cut;
  Slices slices;
  int64_t bytes;  // of scratch memory

  Routing routing;
  ProductTasks first, second;
  std::atomic<int64_t>* first_done;  // [experts] finished first-product tasks of an active expert
  Schedule* schedule;
  uint16_t* h;  // blocks of the second product, experts in order, bf16
  float* y[2];  // [pairs, slice columns]
  Hand* hands;

  Layer(const moe_layer_args& args, const KernelTable& table, int threads);

  // `scratch` has `bytes` bytes.
  void lay_out(void* scratch);
  // After routing.
  void make_schedule();
  Place next_place() const;
  // What a task at that place multiplies first.
  Following following(const Place& place) const;
  // Threads that the routed rows are worth.
  int team_size() const;

  int64_t element_bytes() const { return table.f32_blocks ? 4 : 2; }
  int64_t k_block(int64_t rows, int64_t steps) const { return k_block_steps(rows, steps, element_bytes(), cut.cached_bytes); }
  int64_t slice_columns() const { return slices.panels * kPanelCols; }
  // Tasks of one weighted sum: parts of columns times parts of tokens.
  int64_t sum_parts() const;
  int64_t sum_tokens() const;
  int64_t sum_tasks() const;

 private:
  // Takes the coarsest cut that needs at most that much memory; false, and the finest cut, where there is none.
  bool cut_to(int64_t most_bytes);
  void lay_out(Arena& arena);
  void lay_out(Hand& hand, Arena& arena) const;
};

constexpr int64_t kSumColumns = 1024;  // columns of one weighted-sum task: 4 KiB of every row it adds
constexpr int64_t kZeroRows = 4096;    // pairs looked at by one zeroing task

}  // namespace moe
