#include "ops/schedule.h"

#include <algorithm>

#include "runtime/parallel.h"

namespace moe {

void lay_out(ProductTasks& tasks, int64_t experts, Arena& arena) {
  tasks.before = arena.take<int64_t>(experts + 1);
  tasks.per_task = arena.take<int32_t>(experts);
  tasks.total = 0;
}

void plan(ProductTasks& tasks, const Routing& routing, int64_t panels, int64_t steps, const RowLimits& limits, const Machine& machine) {
  tasks.panels = panels;
  tasks.rows = limits;
  int64_t total_cost = 0;
  for (int64_t i = 0; i < routing.active_count; ++i) {
    const int64_t expert_rows = routing.rows_of(routing.active[i]), rows = task_rows(expert_rows, limits);
    total_cost += ceil_div(expert_rows, rows) * panels * panel_cost(rows, steps, limits.block);
  }
  tasks.before[0] = 0;
  for (int64_t i = 0; i < routing.active_count; ++i) {
    const int64_t expert_rows = routing.rows_of(routing.active[i]), rows = task_rows(expert_rows, limits);
    const int64_t per_task = task_panels(total_cost, panel_cost(rows, steps, limits.block), panels, machine);
    tasks.per_task[i] = static_cast<int32_t>(per_task);
    tasks.before[i + 1] = tasks.before[i] + ceil_div(expert_rows, rows) * ceil_div(panels, per_task);
  }
  tasks.total = tasks.before[routing.active_count];
}

ProductTask task_at(const ProductTasks& tasks, const Routing& routing, int64_t index) {
  const int64_t active = std::upper_bound(tasks.before, tasks.before + routing.active_count + 1, index) - tasks.before - 1;
  const int64_t expert_rows = routing.rows_of(routing.active[active]), rows = task_rows(expert_rows, tasks.rows);
  const int64_t per_task = tasks.per_task[active], columns = ceil_div(tasks.panels, per_task);
  const int64_t within = index - tasks.before[active], first_row = within / columns * rows, first_panel = within % columns * per_task;
  return {active, first_row, std::min(rows, expert_rows - first_row), first_panel, std::min(first_panel + per_task, tasks.panels)};
}

void wait_for(const std::atomic<int64_t>& done, int64_t target) {
  for (int turn = 0; done.load(std::memory_order_acquire) < target; turn += turn < kSpinTurns) spin_pause(turn);
}

}  // namespace moe
