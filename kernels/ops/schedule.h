// The layer as one ordered list of tasks that threads take from a counter, with no barrier between its phases.
//
//   [zero skipped rows] first products | second products of slice 0, 1, weighted sum of slice 0, second products of slice 2, weighted sum of 1, ...
//
// A task waits for what it reads. Tasks are taken in order and wait only for earlier ones; by the time one is taken, what it needs is mostly long
// done. One slow thread delays two tasks, not a barrier: a thread takes its next task before it works on the present one, so that the panels of the
// next can be fetched meanwhile. Somebody always moves nevertheless: whoever holds the earliest unfinished task has finished all it took before.
#pragma once

#include <atomic>
#include <cstdint>

#include "ops/routing.h"
#include "runtime/blocking.h"

namespace moe {

enum class TaskKind : int32_t { kNone, kZero, kFirst, kSecond, kSum };

struct Phase {
  TaskKind kind;
  int32_t slice;
  int64_t begin;  // number of its first task
};

// One product's tasks over all active experts, experts with most rows first.
struct ProductTasks {
  int64_t* before;     // [active + 1] tasks of the experts ahead of this one
  int32_t* per_task;   // [active] panels of one task
  int64_t panels;      // of every expert
  RowLimits rows;
  int64_t total;
};

struct ProductTask {
  int64_t active;              // index into Routing::active
  int64_t first_row, rows;     // within the expert
  int64_t first_panel, last_panel;
};

void lay_out(ProductTasks& tasks, int64_t experts, Arena& arena);
void plan(ProductTasks& tasks, const Routing& routing, int64_t panels, int64_t steps, const RowLimits& rows, const Machine& machine);
ProductTask task_at(const ProductTasks& tasks, const Routing& routing, int64_t index);

struct Schedule {
  Phase phases[3 + 2 * kMostSlices];
  int phase_count;
  int64_t task_count;
  std::atomic<int64_t> next;
  std::atomic<int64_t> second_done[kMostSlices], sum_done[kMostSlices];

  void add(TaskKind kind, int slice, int64_t tasks) {
    phases[phase_count++] = {kind, slice, task_count};
    task_count += tasks;
  }
  int64_t take() { return next.fetch_add(1, std::memory_order_relaxed); }
  const Phase& phase_of(int64_t task) const {
    int i = phase_count - 1;
    while (phases[i].begin > task) --i;
    return phases[i];
  }
};

// Returns when `done` reaches `target`.
void wait_for(const std::atomic<int64_t>& done, int64_t target);

}  // namespace moe
