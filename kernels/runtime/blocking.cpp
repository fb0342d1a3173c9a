#include "runtime/blocking.h"

namespace moe {
namespace {

int64_t clamp(int64_t value, int64_t low, int64_t high) { return value < low ? low : value > high ? high : value; }

}  // namespace

int64_t task_rows(int64_t expert_rows, int block_rows) {
  const int64_t tasks = ceil_div(expert_rows, kMostTaskRows / block_rows * block_rows);
  return round_up(ceil_div(expert_rows, tasks), block_rows);
}

int64_t k_block_steps(int64_t rows, int64_t steps, int64_t element_bytes, const Machine& machine) {
  const int64_t bytes = rows * steps * kStep * element_bytes;
  const int64_t blocks = clamp(ceil_div(bytes, machine.l2_bytes / 2), 1, steps);
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

Slices column_slices(int64_t rows, int64_t hidden) {
  constexpr int64_t kSliceBytes = int64_t{64} << 20;
  const int64_t bytes = rows * hidden * static_cast<int64_t>(sizeof(float)), panels = w2_panels(hidden);
  if (bytes <= kSliceBytes) return {1, panels};
  const int64_t per_slice = ceil_div(panels, clamp(ceil_div(bytes, kSliceBytes), 4, 16));
  return {ceil_div(panels, per_slice), per_slice};
}

}  // namespace moe
