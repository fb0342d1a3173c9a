// Sizes of blocks and tasks on machines that are not here: pure functions, so tables and invariants.
#include "runtime/blocking.h"

#include <algorithm>
#include <cstdint>

#include "check.h"

namespace {

using namespace moe;

constexpr int64_t kKiB = 1 << 10, kMiB = 1 << 20;
constexpr int kBlockRows[] = {1, 2, 4, 6, 8, 16, 24, 32, 48, 64};
constexpr Machine kMachines[] = {{1, 512 * kKiB}, {2, kMiB}, {8, 1280 * kKiB}, {64, kMiB}, {60, 2 * kMiB}, {384, 2 * kMiB}, {4096, 4 * kMiB}};

}  // namespace

TEST(blocking_task_rows) {
  struct {
    int64_t expert_rows;
    RowLimits limits;
    int64_t want;
  } const table[] = {
      {1, {32, 256}, 32},    {1, {1, 256}, 1},      {33, {32, 256}, 64},   {256, {32, 256}, 256}, {257, {32, 256}, 160},  // not 256 and 1
      {300, {32, 320}, 320}, {321, {32, 320}, 192}, {512, {32, 256}, 256}, {513, {32, 256}, 192}, {1000, {32, 256}, 256}, {1025, {16, 256}, 208},
      {252, {6, 252}, 252},  {253, {6, 252}, 132},  {33, {32, 32}, 32},    {200, {32, 64}, 64},   {130, {12, 120}, 72},   {5, {1, 1}, 1},
  };
  for (const auto& row : table) CHECK(task_rows(row.expert_rows, row.limits) == row.want);
  for (int block : kBlockRows) {
    for (int64_t most : {int64_t{block}, int64_t{3 * block}, kMostF32TaskRows / block * block, kMostTaskRows / block * block}) {
      for (int64_t expert_rows = 1; expert_rows < 1600; ++expert_rows) {
        const int64_t rows = task_rows(expert_rows, {block, most}), tasks = ceil_div(expert_rows, rows);
        CHECK(rows % block == 0);
        CHECK(rows > 0 && rows <= most);
        CHECK(tasks <= ceil_div(expert_rows, most));  // no more than are needed
        CHECK(rows - block < ceil_div(expert_rows, tasks));           // nor larger than equal parts are
      }
    }
  }
  CHECK(task_rows(int64_t{1} << 40, {32, 256}) == 256);
}

TEST(blocking_k_blocks) {
  CHECK(k_block_steps(32, 64, 2, kMiB) == 64);     // 128 KiB
  CHECK(k_block_steps(256, 64, 2, kMiB) == 64);    // 1 MiB
  CHECK(k_block_steps(256, 64, 4, kMiB) == 32);    // float32 rows are twice that
  CHECK(k_block_steps(256, 224, 2, kMiB) == 56);   // four equal blocks
  CHECK(k_block_steps(256, 448, 2, 256 * kKiB) == 16);
  CHECK(k_block_steps(256, 3, 4, 1) == 1);         // never less than a step
  for (int64_t cached : {4 * kKiB, 256 * kKiB, 640 * kKiB, kMiB}) {
    for (int64_t rows : {1, 6, 32, 96, 256}) {
      for (int64_t steps = 1; steps < 500; steps += 7) {
        for (int64_t bytes : {2, 4}) {
          const int64_t block = k_block_steps(rows, steps, bytes, cached);
          CHECK(block >= 1 && block <= steps);
          CHECK((block - 1) * rows * kStep * bytes < cached);  // equal blocks may be a part of one step too long
          CHECK(block <= k_block_steps(rows > 1 ? rows - 1 : 1, steps, bytes, cached));  // fewer rows, no shorter blocks
          if (rows * steps * kStep * bytes <= cached) CHECK(block == steps);
        }
      }
    }
  }
}

TEST(blocking_cuts_get_finer) {
  const Machine machine{48, 2 * kMiB};
  const Cut coarsest = cut_at(0, 5000, 32, false, machine);
  CHECK(coarsest.rows.block == 32 && coarsest.rows.task == 320 && coarsest.cached_bytes == kMiB && coarsest.threads == 48);
  CHECK(cut_at(0, 5000, 32, true, machine).rows.task == 256);  // float32 takes twice the room
  CHECK(cut_at(0, 33, 32, false, machine).rows.task == 64);  // no expert has more rows, unless a token names it twice
  CHECK(cut_at(0, 0, 12, true, machine).rows.task == 12);
  CHECK(cut_at(6, 5000, 32, false, machine).whole && cut_at(6, 5000, 32, false, machine).cached_bytes == kMiB);
  const Cut wide = cut_at(2, 5000, 12, true, machine), in_blocks = cut_at(3, 5000, 12, true, machine);
  CHECK(wide.whole && wide.rows.task == 60 && wide.cached_bytes == kMiB);
  CHECK(!in_blocks.whole && in_blocks.rows.task == 60 && in_blocks.cached_bytes == kMiB / 2);
  CHECK(cut_at(4, 5000, 12, true, machine).rows.task == 24 && cut_at(4, 5000, 12, true, machine).cached_bytes == kMiB / 4);
  CHECK(cut_at(4, 5000, 32, false, machine).rows.block == 20);
  CHECK(cut_at(kFinestRows, 5000, 32, false, machine).rows.task == 1 && cut_at(kFinestRows, 5000, 32, false, machine).threads == 48);
  CHECK(cut_at(kFinestRows + 2, 5000, 32, false, machine).threads == 12 && cut_at(kFinestRows + 9, 5000, 32, false, machine).threads == 1);
  for (const Machine& m : kMachines) {
    for (int block : kBlockRows) {
      for (int64_t tokens : {0, 1, 31, 100, 1 << 20}) {
        for (bool f32_blocks : {false, true}) {
          Cut before = cut_at(0, tokens, block, f32_blocks, m);
          CHECK(before.threads == m.threads && before.rows.block == block);
          for (int notch = 1; notch < kFinestRows + 14; ++notch) {
            const Cut cut = cut_at(notch, tokens, block, f32_blocks, m);
            CHECK(cut.rows.block >= 1 && cut.rows.block <= cut.rows.task && cut.rows.task <= before.rows.task);
            CHECK(cut.cached_bytes > 0 && cut.cached_bytes <= before.cached_bytes && cut.threads >= 1 && cut.threads <= before.threads);
            before = cut;
          }
          CHECK(before.rows.task == 1 && before.threads == 1);
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
  CHECK(column_slices(0, 4096, 1).count == 1);
  CHECK(column_slices(4096, 4096, 1).count == 1 && column_slices(4096, 4096, 1).panels == 128);  // 64 MiB
  CHECK(column_slices(4096, 4096, 8).count == 8 && column_slices(4096, 4096, 8).panels == 16);
  CHECK(column_slices(4097, 4096, 1).count == 4 && column_slices(4097, 4096, 1).panels == 32);
  CHECK(column_slices(int64_t{1} << 17, 4096, 1).count == 16);
  CHECK(column_slices(10, 96, 16).count == 3);  // there are no more panels
  for (int64_t hidden : {1, 31, 33, 512, 528, 576, 2048, 2880, 2879, 4096, 7168, 16384}) {
    for (int64_t rows = 1; rows < int64_t{1} << 31; rows = rows * 3 + 1) {
      const int64_t panels = w2_panels(hidden), bytes = rows * round_up(hidden, kPanelCols) * 4;
      for (int64_t least : {int64_t{1}, int64_t{4}, kMostSlices}) {
        const Slices slices = column_slices(rows, hidden, least);
        CHECK(slices.count >= 1 && slices.count <= kMostSlices);
        CHECK(slices.count * slices.panels >= panels && (slices.count - 1) * slices.panels < panels);  // all columns, and no slice without any
        const int64_t alive = slices.alive() * rows * slices.panels * kPanelCols * 4;
        CHECK(alive <= std::max(bytes, 64 * kMiB));
        if (hidden >= 512) CHECK(alive <= 64 * kMiB + bytes / 2);  // narrower layers have no panels to cut between
      }
    }
  }
}
