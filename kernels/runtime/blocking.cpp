#include "runtime/blocking.h"

namespace moe {
namespace {

constexpr int64_t kPromisedBytes = int64_t{64} << 20;

int64_t clamp(int64_t value, int64_t low, int64_t high) { return value < low ? low : value > high ? high : value; }

}  // namespace

int64_t task_rows(int64_t expert_rows, const RowLimits& limits) {
  const int64_t tasks = ceil_div(expert_rows, limits.task);
  return round_up(ceil_div(expert_rows, tasks), limits.block);
}

int64_t k_block_steps(int64_t rows, int64_t steps, int64_t element_bytes, int64_t cached_bytes) {
  const int64_t bytes = rows * steps * kStep * element_bytes;
  const int64_t blocks = clamp(ceil_div(bytes, cached_bytes), 1, steps);
  return ceil_div(steps, blocks);
}

int64_t panel_cost(int64_t rows, int64_t steps, int block_rows) {
  constexpr int64_t kArrival = 8;
  return steps * (kArrival + ceil_div(rows, block_rows));
}

int64_t task_panels(int64_t total_cost, int64_t cost, int64_t panels, const Machine& machine) {
  constexpr int64_t kTasksPerThread = 8;
  return clamp(total_cost / (kTasksPerThread * machine.threads) / cost, 1, panels);
}

int useful_threads(int64_t bytes, int64_t flops, int threads) {
  // Orders of magnitude of one thread, on the low side; only layers of a few microseconds come out differently with others.
  constexpr int64_t kBytesPerNanosecond = 10, kFlopPerNanosecond = 100, kWorthWaking = 4000;
  const int64_t nanoseconds = bytes / kBytesPerNanosecond + flops / kFlopPerNanosecond;
  return static_cast<int>(clamp(nanoseconds / kWorthWaking + 1, 1, threads));
}

bool worth_streaming(int64_t bytes, const Machine& machine) { return bytes > machine.threads * machine.l2_bytes / 2; }

Slices column_slices(int64_t rows, int64_t hidden, int64_t least) {
  const int64_t bytes = rows * hidden * static_cast<int64_t>(sizeof(float)), panels = w2_panels(hidden);
  const int64_t natural = bytes <= kPromisedBytes ? 1 : clamp(ceil_div(bytes, kPromisedBytes), 4, kMostSlices);
  const int64_t per_slice = ceil_div(panels, natural < least ? least : natural);
  return {ceil_div(panels, per_slice), per_slice};
}

Cut cut_at(int notch, int64_t tokens, int block_rows, bool f32_blocks, const Machine& machine) {
  const bool whole = !f32_blocks || notch <= kWholeRows;
  const int finer = whole ? notch : notch - 1, halvings = finer < kFinestRows ? finer : kFinestRows;
  // Halved to less than a block, 320 rows are no whole tiles; that short of memory it does not matter.
  const int64_t most = (f32_blocks ? kMostF32TaskRows : kMostTaskRows) >> halvings;
  const int block = static_cast<int>(clamp(block_rows, 1, most));
  // An expert has more rows than there are tokens only when a token names it twice.
  const int64_t task = clamp(round_up(tokens, block), block, most / block * block);
  // Where rows are held whole, fewer of them may fill the cache with more of each.
  const int64_t cached = machine.l2_bytes / 2 >> (whole ? 0 : halvings - kWholeRows + 1);
  return {{block, task}, cached, whole, static_cast<int>(clamp(machine.threads >> (finer - halvings), 1, machine.threads))};
}

int64_t memory_promised(int64_t pairs, int64_t hidden, int64_t intermediate) {
  return kPromisedBytes + pairs * (hidden + intermediate) * static_cast<int64_t>(sizeof(uint16_t));
}

}  // namespace moe
