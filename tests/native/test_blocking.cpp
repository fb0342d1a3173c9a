// Sizes of blocks and tasks on machines that are not here: pure functions, so tables and invariants.
#include "runtime/blocking.h"

#include <algorithm>
#include <cstdint>

#include "check.h"
#include "moe/c_api.h"
#include "moe/kernel_table.h"
#include "ops/schedule.h"

namespace {

using namespace moe;

constexpr int64_t kKiB = 1 << 10, kMiB = 1 << 20;
constexpr int kBlockRows[] = {1, 2, 4, 6, 8, 16, 24, 32, 48, 64};
constexpr Machine kMachines[] = {{1, 512 * kKiB}, {2, kMiB}, {8, 1280 * kKiB}, {64, kMiB}, {60, 2 * kMiB}, {384, 2 * kMiB}, {4096, 4 * kMiB}};

int64_t layer_scratch(int isa, int threads, int64_t tokens, int64_t topk, int64_t hidden, int64_t intermediate, int32_t mode) {
  moe_layer_args args = {};
  args.tokens = tokens;
  args.topk = topk;
  args.hidden = hidden;
  args.intermediate = intermediate;
  args.experts = args.global_experts = 128;
  args.x_dtype = MOE_BF16;
  args.mode = mode;
  args.isa = isa;
  args.threads = threads;
  return moe_layer_scratch_bytes(&args);
}

}  // namespace

TEST(blocking_task_rows) {
  struct {
    int64_t expert_rows;
    int block_rows;
    int64_t want;
  } const table[] = {
      {1, 32, 32},    {1, 1, 1},      {33, 32, 64},    {256, 32, 256},  {257, 32, 160},  // two equal parts instead of 256 and 1
      {512, 32, 256}, {513, 32, 192}, {1000, 32, 256}, {1025, 16, 208}, {252, 6, 252},  {253, 6, 132},
  };
  for (const auto& row : table) CHECK(task_rows(row.expert_rows, row.block_rows) == row.want);
  for (int block_rows : kBlockRows) {
    for (int64_t expert_rows = 1; expert_rows < 1600; ++expert_rows) {
      const int64_t rows = task_rows(expert_rows, block_rows), tasks = ceil_div(expert_rows, rows);
      CHECK(rows % block_rows == 0);
      CHECK(rows > 0 && rows <= kMostTaskRows);
      CHECK(tasks <= ceil_div(expert_rows, kMostTaskRows / block_rows * block_rows));   // no more than are needed
      CHECK(rows - block_rows < ceil_div(expert_rows, tasks));  // nor larger than equal parts are
    }
  }
  CHECK(task_rows(int64_t{1} << 40, 32) == 256);
}

TEST(blocking_k_blocks) {
  CHECK(k_block_steps(32, 64, 2, {1, 2 * kMiB}) == 64);     // 128 KiB
  CHECK(k_block_steps(256, 64, 2, {1, 2 * kMiB}) == 64);    // 1 MiB, half of L2
  CHECK(k_block_steps(256, 64, 4, {1, 2 * kMiB}) == 32);    // float32 rows are twice that
  CHECK(k_block_steps(256, 224, 2, {1, 2 * kMiB}) == 56);   // four equal blocks
  CHECK(k_block_steps(256, 448, 2, {1, 512 * kKiB}) == 16);
  CHECK(k_block_steps(256, 3, 4, {1, 2}) == 1);             // never less than a step
  for (const Machine& machine : kMachines) {
    for (int64_t rows : {1, 6, 32, 96, 256}) {
      for (int64_t steps = 1; steps < 500; steps += 7) {
        for (int64_t bytes : {2, 4}) {
          const int64_t block = k_block_steps(rows, steps, bytes, machine);
          CHECK(block >= 1 && block <= steps);
          CHECK((block - 1) * rows * kStep * bytes < machine.l2_bytes / 2);  // equal blocks may be a part of one step too long
          if (rows * steps * kStep * bytes <= machine.l2_bytes / 2) CHECK(block == steps);
        }
      }
    }
  }
}

TEST(blocking_task_panels) {
  CHECK(panel_cost(1, 64, 32) == 64 * 9);
  CHECK(panel_cost(256, 64, 32) == 64 * 16);  // eight times the rows for less than twice the cost: the panel arrives once
  for (const Machine& machine : kMachines) {
    for (int64_t panels : {1, 2, 24, 48, 448}) {
      for (int64_t cost : {9, 64 * 9, 64 * 16, 448 * 16}) {
        for (int64_t experts : {1, 8, 128, 512}) {
          const int64_t total = experts * panels * cost, per_task = task_panels(total, cost, panels, machine);
          CHECK(per_task >= 1 && per_task <= panels);
          const int64_t tasks = experts * ceil_div(panels, per_task);
          // Eight tasks a thread, unless there are not so many panels or so few experts that one of them is several tasks.
          if (per_task > 1) CHECK(tasks >= 8 * machine.threads);
          if (per_task < panels) CHECK((per_task + 1) * cost * 8 * machine.threads > total);
        }
      }
    }
  }
  CHECK(task_panels(8 * 2 * 100, 100, 448, {2, kMiB}) == 1);
  CHECK(task_panels(8 * 2 * 1000, 100, 448, {2, kMiB}) == 10);
  CHECK(task_panels(8 * 2 * 100000, 100, 448, {2, kMiB}) == 448);
}

TEST(blocking_threads_worth_waking) {
  CHECK(useful_threads(0, 0, 64) == 1);
  CHECK(useful_threads(8 * 3 * 64 * 32 * 2, 8 * 3 * 64 * 32 * 2, 64) <= 4);      // the layer that call overhead is measured on
  CHECK(useful_threads(int64_t{8} * 3 * 1024 * 512 * 2, 0, 64) == 64);            // 24 MiB: one token of a small model
  CHECK(useful_threads(int64_t{1} << 50, int64_t{1} << 55, 192) == 192);          // no overflow
  for (int threads : {1, 2, 3, 64, 384}) {
    int before = 1;
    for (int64_t bytes = 1; bytes < int64_t{1} << 40; bytes *= 2) {
      const int useful = useful_threads(bytes, 3 * bytes, threads);
      CHECK(useful >= before && useful <= threads);
      before = useful;
    }
    CHECK(before == threads);
  }
}

TEST(blocking_streaming_starts_past_the_caches) {
  for (const Machine& machine : kMachines) {
    CHECK(!worth_streaming(0, machine));
    CHECK(!worth_streaming(machine.threads * machine.l2_bytes / 2, machine));
    CHECK(worth_streaming(machine.threads * machine.l2_bytes / 2 + 1, machine));
  }
}

TEST(blocking_column_slices) {
  CHECK(column_slices(0, 4096).count == 1);
  CHECK(column_slices(4096, 4096).count == 1 && column_slices(4096, 4096).panels == 128);  // 64 MiB
  CHECK(column_slices(4097, 4096).count == 4 && column_slices(4097, 4096).panels == 32);
  CHECK(column_slices(int64_t{1} << 17, 4096).count == 16);
  for (int64_t hidden : {1, 31, 33, 512, 528, 576, 2048, 2880, 2879, 4096, 7168, 16384}) {
    for (int64_t rows = 1; rows < int64_t{1} << 31; rows = rows * 3 + 1) {
      const Slices slices = column_slices(rows, hidden);
      const int64_t panels = w2_panels(hidden), bytes = rows * round_up(hidden, kPanelCols) * 4;
      CHECK(slices.count >= 1 && slices.count <= Schedule::kMostSlices);
      CHECK(slices.count * slices.panels >= panels && (slices.count - 1) * slices.panels < panels);  // all columns, and no slice without any
      const int64_t alive = slices.alive() * rows * slices.panels * kPanelCols * 4;
      CHECK(alive <= std::max(bytes, 64 * kMiB));
      if (hidden >= 512) CHECK(alive <= 64 * kMiB + bytes / 2);  // narrower layers have no panels to cut between
    }
  }
}

// What a call may take beside its tensors: 64 MiB, one bf16 value for each element of h and of the unreduced result, and each thread's own.
TEST(blocking_scratch_memory_is_bounded) {
  const struct {
    int64_t hidden, intermediate, topk;
  } layers[] = {{2048, 768, 8}, {7168, 2048, 8}, {4096, 14336, 2}, {2880, 2880, 4}, {2048, 512, 10}, {5120, 8192, 1}, {1001, 333, 3}};
  for (int isa = 0; isa < 5; ++isa) {
    const KernelTable* const table = kernel_table(isa);
    if (!table) continue;  // it cannot run here, and needs nothing
    const int64_t element = table->f32_blocks ? 4 : 2;
    for (const auto& layer : layers) {
      const int64_t hidden = round_up(layer.hidden, kStep), intermediate = round_up(layer.intermediate, kStep);
      for (int threads : {1, 2, 64}) {
        const int64_t own = kMostTaskRows * (hidden * element + kGroupPanels * kPanelCols * 4) + 64 * kKiB;
        for (int64_t tokens : {0, 1, 2, 16, 256, 1024, 4096, 32768, 262144}) {
          const int64_t pairs = tokens * layer.topk, routing = 12 * pairs + 64 * kKiB;
          const int64_t h = pairs * intermediate * element;
          const int64_t reduced = layer_scratch(isa, threads, tokens, layer.topk, layer.hidden, layer.intermediate, MOE_REDUCED);
          CHECK(reduced > 0 && reduced <= 64 * kMiB + pairs * hidden * 2 + h + routing + threads * own);
          const int64_t unreduced = layer_scratch(isa, threads, tokens, layer.topk, layer.hidden, layer.intermediate, MOE_UNREDUCED);
          CHECK(unreduced > 0 && unreduced <= h + routing + threads * own);  // the result goes where it belongs
        }
      }
    }
  }
}
