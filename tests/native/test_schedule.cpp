// Tasks of a product: every row of every expert meets every panel exactly once, on any machine and however skewed the routing is.
#include "ops/schedule.h"

#include <cstdint>
#include <numeric>
#include <vector>

#include "check.h"

namespace {

using namespace moe;

// The routing that gives expert e `rows[e]` rows.
struct Routed {
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> active;
  Routing routing = {};

  explicit Routed(const std::vector<int64_t>& rows) {
    for (size_t e = 0; e < rows.size(); ++e) {
      offsets.push_back(offsets.back() + rows[e]);
      if (rows[e] > 0) active.push_back(static_cast<int32_t>(e));
    }
    routing.offsets = offsets.data();
    routing.active = active.data();
    routing.active_count = static_cast<int64_t>(active.size());
  }
};

// Tasks in memory of their own.
struct Tasks {
  std::vector<int64_t> before;
  std::vector<int32_t> per_task;
  ProductTasks tasks = {};

  explicit Tasks(size_t experts) : before(experts + 1, -1), per_task(experts, -1) {
    tasks.before = before.data();
    tasks.per_task = per_task.data();
  }
};

bool covers(const std::vector<int64_t>& rows, int64_t panels, int64_t steps, const RowLimits& limits, const Machine& machine) {
  const int block_rows = limits.block;
  const Routed routed(rows);
  Tasks made(rows.size());
  plan(made.tasks, routed.routing, panels, steps, limits, machine);
  // Panels that each block of rows of each active expert has met, in order.
  std::vector<std::vector<int64_t>> met(rows.size());
  for (int64_t index = 0; index < made.tasks.total; ++index) {
    const ProductTask task = task_at(made.tasks, routed.routing, index);
    if (task.active < 0 || task.active >= routed.routing.active_count) return false;
    const int64_t expert_rows = routed.routing.rows_of(routed.active[static_cast<size_t>(task.active)]);
    const bool inside = task.first_row >= 0 && task.rows > 0 && task.first_row + task.rows <= expert_rows && task.rows <= limits.task;
    const bool whole_blocks = task.first_row % block_rows == 0 && (task.rows % block_rows == 0 || task.first_row + task.rows == expert_rows);
    const bool some_panels = task.first_panel >= 0 && task.first_panel < task.last_panel && task.last_panel <= panels;
    if (!inside || !whole_blocks || !some_panels) return false;
    std::vector<int64_t>& next = met[static_cast<size_t>(task.active)];
    next.resize(static_cast<size_t>(ceil_div(expert_rows, block_rows)), 0);
    for (int64_t row = task.first_row; row < task.first_row + task.rows; row += block_rows) {
      int64_t& panel = next[static_cast<size_t>(row / block_rows)];
      if (panel != task.first_panel) return false;  // a panel left out, or met twice
      panel = task.last_panel;
    }
  }
  for (int64_t i = 0; i < routed.routing.active_count; ++i) {
    if (met[static_cast<size_t>(i)].empty()) return false;
    for (int64_t panel : met[static_cast<size_t>(i)]) {
      if (panel != panels) return false;
    }
  }
  return true;
}

constexpr Machine kMachines[] = {{1, 1 << 19}, {2, 1 << 20}, {64, 1 << 21}, {384, 1 << 21}};

}  // namespace

TEST(schedule_covers_every_row_and_panel_once) {
  const std::vector<std::vector<int64_t>> routings = {
      {1}, {257}, {5000}, {0, 0, 3, 0}, {1, 1, 1, 1, 1, 1, 1, 1}, {4000, 1, 0, 33, 256, 255, 512, 513}, std::vector<int64_t>(128, 16)};
  for (const Machine& machine : kMachines) {
    for (const auto& rows : routings) {
      for (const RowLimits& limits : {RowLimits{1, 1}, {1, 256}, {6, 252}, {16, 16}, {32, 32}, {32, 64}, {32, 320}, {48, 240}}) {
        for (int64_t panels : {1, 3, 48, 448}) {
          for (int64_t steps : {1, 64, 224}) CHECK(covers(rows, panels, steps, limits, machine));
        }
      }
    }
  }
}

TEST(schedule_without_rows_has_no_tasks) {
  const Routed routed({0, 0, 0});
  Tasks made(3);
  plan(made.tasks, routed.routing, 48, 64, {32, 256}, kMachines[2]);
  CHECK(made.tasks.total == 0 && made.tasks.before[0] == 0);
}

TEST(schedule_shares_out_skewed_work) {
  // One expert with nearly everything, on 64 threads: no task is more than an eighth of a thread's share, or it is a single panel.
  const std::vector<int64_t> rows = {4000, 3, 2, 1};
  const Routed routed(rows);
  Tasks made(rows.size());
  const int64_t panels = 448, steps = 128;
  plan(made.tasks, routed.routing, panels, steps, {32, 256}, kMachines[2]);
  int64_t total = 0, largest = 0;
  for (int64_t index = 0; index < made.tasks.total; ++index) {
    const ProductTask task = task_at(made.tasks, routed.routing, index);
    const int64_t cost = (task.last_panel - task.first_panel) * panel_cost(task.rows, steps, 32);
    total += cost;
    largest = largest > cost || task.last_panel - task.first_panel == 1 ? largest : cost;
  }
  CHECK(largest * 8 * 64 <= total * 11 / 10);  // the last task of an expert has fewer rows than planned, so the plan's total is a little more
}

TEST(schedule_finds_the_phase_of_a_task) {
  Schedule schedule{};
  const int64_t tasks[] = {3, 5, 1, 4, 2};
  const TaskKind kinds[] = {TaskKind::kFirst, TaskKind::kSecond, TaskKind::kSecond, TaskKind::kSum, TaskKind::kSum};
  for (int i = 0; i < 5; ++i) schedule.add(kinds[i], i, tasks[i]);
  CHECK(schedule.task_count == std::accumulate(tasks, tasks + 5, int64_t{0}));
  int64_t task = 0;
  for (int i = 0; i < 5; ++i) {
    for (int64_t within = 0; within < tasks[i]; ++within, ++task) {
      const Phase& phase = schedule.phase_of(task);
      CHECK(phase.kind == kinds[i] && phase.slice == i && task - phase.begin == within);
    }
  }
}
