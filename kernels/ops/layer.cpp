// The whole Permute-Experts-Unpermute stage, with the weighted sum: check, route, plan, then one team of threads works off the schedule.
#include <emmintrin.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "moe/c_api.h"
#include "moe/kernel_table.h"
#include "moe/panel_rows.h"
#include "ops/expert_gemm.h"
#include "ops/layer_args.h"
#include "ops/router_weights.h"
#include "ops/routing.h"
#include "ops/schedule.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"

namespace moe {
namespace {

constexpr int64_t kSumColumns = 1024;  // columns of one weighted-sum task: 4 KiB of every row it adds
constexpr int64_t kSumRows = 64;       // rows it adds, about: 256 KiB read
constexpr int64_t kZeroRows = 4096;    // pairs looked at by one zeroing task

// What one thread owns.
struct Hand {
  char* a;           // gathered rows of one task
  float* sums;
  const float** sum_rows;   // [topk]
  float* sum_weights;       // [topk]
  int64_t gathered_active, gathered_row;  // what `a` holds, -1 = nothing
  Following following;
};

struct Layer {
  const moe_layer_args& args;
  const KernelTable& table;
  Machine machine;
  bool gated;
  int64_t w1_count, w2_count, k_steps, i_steps;  // panels of w1 and w2; steps of their k
  Slices slices;
  int64_t pairs;

  Routing routing;
  ProductTasks first, second;
  std::atomic<int64_t>* first_done;  // [experts] finished first-product tasks of an active expert
  Schedule* schedule;
  char* h;      // blocks of the second product, experts in order
  float* y[2];  // [pairs, slice columns]
  Hand* hands;

  Layer(const moe_layer_args& a, const KernelTable& t, int threads)
      : args(a), table(t), machine{threads, std::max<int64_t>(moe_cache_bytes(2), int64_t{1} << 19)}, gated(a.gate_layout != MOE_UNGATED) {
    w1_count = w1_panels(a.intermediate, gated);
    w2_count = w2_panels(a.hidden);
    k_steps = steps_of(a.hidden);
    i_steps = steps_of(a.intermediate);
    pairs = a.tokens * (a.mode == MOE_BATCHED ? a.experts : a.topk);
    slices = a.mode == MOE_REDUCED ? column_slices(pairs, a.hidden) : Slices{1, w2_count};
  }

  int64_t element_bytes() const { return table.f32_blocks ? 4 : 2; }
  int64_t slice_columns() const { return slices.panels * kPanelCols; }

  void lay_out(Arena& arena) {
    moe::lay_out(routing, args, arena);
    moe::lay_out(first, args.experts, arena);
    moe::lay_out(second, args.experts, arena);
    first_done = arena.take<std::atomic<int64_t>>(args.experts);
    schedule = arena.take<Schedule>(1);
    h = arena.take<char>(pairs * i_steps * kStep * element_bytes() + table.read_slack);
    for (int64_t i = 0; i < 2; ++i) y[i] = args.mode == MOE_REDUCED && i < slices.alive() ? arena.take<float>(pairs * slice_columns()) : nullptr;
    hands = arena.take<Hand>(machine.threads);
    const int64_t rows = std::min<int64_t>(pairs, kMostTaskRows);
    const int64_t a_bytes = rows * k_steps * kStep * element_bytes() + table.read_slack;
    for (int i = 0; i < machine.threads; ++i) {
      const Hand hand{arena.take<char>(a_bytes),
                      arena.take<float>(sums_elements(table, rows)),
                      arena.take<const float*>(args.topk),
                      arena.take<float>(args.topk),
                      -1,
                      -1,
                      {}};
      if (hands) hands[i] = hand;
    }
  }

  // Tasks of one weighted sum: parts of columns times parts of tokens.
  int64_t sum_parts() const { return ceil_div(slice_columns(), kSumColumns); }
  int64_t sum_tokens() const { return std::max<int64_t>(kSumRows / std::max<int64_t>(args.topk, 1), 1); }
  int64_t sum_tasks() const { return sum_parts() * ceil_div(args.tokens, sum_tokens()); }

  void make_schedule() {
    plan(first, routing, w1_count, k_steps, table.block_rows, machine);
    plan(second, routing, slices.panels, i_steps, table.block_rows, machine);
    for (int64_t i = 0; i < routing.active_count; ++i) new (&first_done[i]) std::atomic<int64_t>(0);
    new (schedule) Schedule{};
    if (args.mode == MOE_UNREDUCED && routing.skipped) schedule->add(TaskKind::kZero, 0, ceil_div(pairs, kZeroRows));
    schedule->add(TaskKind::kFirst, 0, first.total);
    for (int s = 0; s < slices.count; ++s) {
      schedule->add(TaskKind::kSecond, s, second.total);
      if (args.mode == MOE_REDUCED && s > 0) schedule->add(TaskKind::kSum, s - 1, sum_tasks());
    }
    if (args.mode == MOE_REDUCED) schedule->add(TaskKind::kSum, static_cast<int>(slices.count) - 1, sum_tasks());
  }

  void work(int rank) {
    table.enter();
    for (int64_t task = schedule->take(), following; task < schedule->task_count; task = following) {
      following = schedule->take();
      hands[rank].following = first_panel(following);
      const Phase& phase = schedule->phase_of(task);
      const int64_t index = task - phase.begin;
      switch (phase.kind) {
        case TaskKind::kZero:
          zero_skipped(index);
          break;
        case TaskKind::kFirst:
          first_product(index, hands[rank]);
          break;
        case TaskKind::kSecond:
          second_product(index, phase.slice, hands[rank]);
          break;
        case TaskKind::kSum:
          weighted_sum(index, phase.slice, hands[rank]);
          break;
      }
    }
    table.leave();
  }

  // What a task multiplies first: the panel's first block of k.
  Following first_panel(int64_t task) const {
    if (task >= schedule->task_count) return {};
    const Phase& phase = schedule->phase_of(task);
    const int64_t index = task - phase.begin;
    if (phase.kind == TaskKind::kFirst) {
      const ProductTask t = task_at(first, routing, index, w1_count, table.block_rows);
      return {args.w1 + (routing.active[t.active] * w1_count + t.first_panel) * panel_elements(args.hidden), block_bytes(t.rows, k_steps)};
    }
    if (phase.kind == TaskKind::kSecond) {
      const ProductTask t = task_at(second, routing, index, slices.panels, table.block_rows);
      const int64_t panel = phase.slice * slices.panels + t.first_panel;
      if (panel >= w2_count) return {};  // the last slice is narrower
      return {args.w2 + (routing.active[t.active] * w2_count + panel) * panel_elements(args.intermediate), block_bytes(t.rows, i_steps)};
    }
    return {};
  }

  int64_t block_bytes(int64_t rows, int64_t steps) const {
    return std::min(k_block_steps(rows, steps, element_bytes(), machine), steps) * kPanelStep * static_cast<int64_t>(sizeof(uint16_t));
  }

  // h = activation(x w1^T + b1) for some rows and neurons of one expert.
  void first_product(int64_t index, Hand& hand) {
    const ProductTask task = task_at(first, routing, index, w1_count, table.block_rows);
    const int64_t expert = routing.active[task.active];
    gather(task, expert, hand);
    char* const h_rows = h + (routing.offsets[expert] + task.first_row) * i_steps * kStep * element_bytes();
    const int64_t panel_neurons = gated ? kTileCols : kPanelCols;
    const ExpertGemm gemm{&table,
                          hand.a,
                          task.rows,
                          k_steps,
                          args.w1 + expert * w1_count * panel_elements(args.hidden),
                          task.first_panel,
                          task.last_panel,
                          k_block_steps(task.rows, k_steps, element_bytes(), machine),
                          hand.sums,
                          hand.following};
    run(gemm, [&](int64_t panel, int64_t first_row, int rows, const float* sums) {
      float bias[kPanelCols];
      if (args.w1_bias) panel_bias(bias, expert, panel);
      char* const block = h_rows + first_row * i_steps * kStep * element_bytes();
      table.activate({sums, args.w1_bias ? bias : nullptr, rows, args.activation, block, panel * panel_neurons});
    });
    first_done[task.active].fetch_add(1, std::memory_order_release);
  }

  // Rows of x that the task needs, in blocks. Consecutive tasks of a thread often share them.
  void gather(const ProductTask& task, int64_t expert, Hand& hand) {
    if (hand.gathered_active == task.active && hand.gathered_row == task.first_row) return;
    hand.gathered_active = task.active;
    hand.gathered_row = task.first_row;
    const int32_t* const flat = routing.rows + routing.offsets[expert] + task.first_row;
    int64_t offsets[64];
    for (int64_t row = 0; row < task.rows; row += table.block_rows) {
      const int rows = static_cast<int>(std::min<int64_t>(table.block_rows, task.rows - row));
      for (int r = 0; r < rows; ++r) {
        offsets[r] = args.mode == MOE_BATCHED ? expert * args.x_stride_expert + (flat[row + r] - expert * args.tokens) * args.x_stride_token
                                              : flat[row + r] / args.topk * args.x_stride_token;
      }
      table.gather({args.x, args.x_dtype, offsets, rows, args.hidden, hand.a + row * k_steps * kStep * element_bytes()});
    }
  }

  // The 32 biases of a panel, in its column order; padding columns have none.
  void panel_bias(float* bias, int64_t expert, int64_t panel) const {
    const int64_t width = gated ? 2 * args.intermediate : args.intermediate;
    for (int64_t column = 0; column < kPanelCols; ++column) {
      const int64_t row = dense_row(args.gate_layout, width, panel, column);
      bias[column] = row < 0 ? 0.0f : args.w1_bias[expert * width + row];
    }
  }

  // y = h w2^T + b2 for some rows and columns of one expert, at the rows' flat positions.
  void second_product(int64_t index, int slice, Hand& hand) {
    ProductTask task = task_at(second, routing, index, slices.panels, table.block_rows);
    const int64_t expert = routing.active[task.active], slice_panel = slice * slices.panels;
    task.last_panel = std::min(task.last_panel, w2_count - slice_panel);
    wait_for(first_done[task.active], first.before[task.active + 1] - first.before[task.active]);
    if (args.mode == MOE_REDUCED && slice >= 2) wait_for(schedule->sum_done[slice - 2], sum_tasks());
    const bool reduced = args.mode == MOE_REDUCED;
    void* const out = reduced ? y[slice % 2] : args.out;
    const bool streamed = reduced && worth_streaming(pairs * slice_columns() * static_cast<int64_t>(sizeof(float)), machine);
    const int64_t row_size = reduced ? slice_columns() : args.hidden;
    const int32_t* const flat = routing.rows + routing.offsets[expert] + task.first_row;
    const ExpertGemm gemm{&table,
                          h + (routing.offsets[expert] + task.first_row) * i_steps * kStep * element_bytes(),
                          task.rows,
                          i_steps,
                          args.w2 + (expert * w2_count + slice_panel) * panel_elements(args.intermediate),
                          task.first_panel,
                          task.last_panel,
                          k_block_steps(task.rows, i_steps, element_bytes(), machine),
                          hand.sums,
                          hand.following};
    run(gemm, [&](int64_t panel, int64_t first_row, int rows, const float* sums) {
      const int64_t column = (slice_panel + panel) * kPanelCols;
      int64_t offsets[64];
      for (int r = 0; r < rows; ++r) offsets[r] = flat[first_row + r] * row_size + panel * kPanelCols;
      const float* const bias = args.w2_bias ? args.w2_bias + expert * args.hidden + column : nullptr;
      const int columns = static_cast<int>(std::min<int64_t>(kPanelCols, args.hidden - column));
      table.store({sums, bias, rows, columns, reduced ? int32_t{MOE_F32} : args.x_dtype, out, offsets, streamed});
    });
    if (streamed) _mm_sfence();  // streaming stores are weakly ordered: they must be visible before the count below
    schedule->second_done[slice].fetch_add(1, std::memory_order_release);
  }

  // out[token] = sum over its slots of weight * y[slot], for some tokens and columns.
  void weighted_sum(int64_t index, int slice, Hand& hand) {
    wait_for(schedule->second_done[slice], second.total);
    const int64_t part = index % sum_parts(), first_token = index / sum_parts() * sum_tokens();
    const int64_t last_token = std::min(first_token + sum_tokens(), args.tokens);
    const int64_t begin = part * kSumColumns, column = slice * slice_columns() + begin;
    const int64_t columns = std::min(std::min(kSumColumns, slice_columns() - begin), args.hidden - column);
    for (int64_t token = first_token; token < last_token && columns > 0; ++token) {
      int slots = 0;
      for (int64_t slot = 0; slot < args.topk; ++slot) {
        const int64_t flat = token * args.topk + slot;
        if (routing.local[flat] < 0) continue;
        hand.sum_rows[slots] = y[slice % 2] + flat * slice_columns() + begin;
        hand.sum_weights[slots++] = weight_at(args, token, slot);
      }
      void* const out = static_cast<char*>(args.out) + (token * args.hidden + column) * dtype_bytes(args.x_dtype);
      table.weighted_sum({hand.sum_rows, hand.sum_weights, slots, columns, args.x_dtype, out});
    }
    schedule->sum_done[slice].fetch_add(1, std::memory_order_release);
  }

  void zero_skipped(int64_t index) {
    const int64_t row_bytes = args.hidden * dtype_bytes(args.x_dtype);
    for (int64_t flat = index * kZeroRows; flat < std::min(pairs, (index + 1) * kZeroRows); ++flat) {
      if (routing.local[flat] < 0) std::memset(static_cast<char*>(args.out) + flat * row_bytes, 0, static_cast<size_t>(row_bytes));
    }
  }

  // Bytes of weights and operations of the routed rows.
  int team_size() const {
    const int64_t weights = (w1_count * panel_elements(args.hidden) + w2_count * panel_elements(args.intermediate));
    return useful_threads(routing.active_count * weights * 2, routing.offsets[args.experts] * weights * 2, machine.threads);
  }
};

}  // namespace
}  // namespace moe

int64_t moe_layer_scratch_bytes(const moe_layer_args* args) {
  const moe::KernelTable* table = moe::kernel_table(args->isa);
  if (!table) return 0;
  moe::Layer layer(*args, *table, std::max(args->threads, 1));
  moe::Arena arena(nullptr, 0);
  layer.lay_out(arena);
  return arena.used();
}

int32_t moe_layer(const moe_layer_args* args, int64_t info[4]) {
  const moe::KernelTable* table = moe::kernel_table(args->isa);
  if (!table) {
    info[0] = args->isa;
    return MOE_ISA_UNAVAILABLE;
  }
  info[0] = 0;
  if (!moe::well_formed(*args)) return MOE_BAD_ARGUMENT;
  moe::Layer layer(*args, *table, std::max(args->threads, 1));
  if (layer.pairs > INT32_MAX) {
    info[0] = layer.pairs;
    info[1] = INT32_MAX;
    return MOE_TOO_LARGE;
  }
  moe::Arena arena(args->scratch, args->scratch_bytes);
  layer.lay_out(arena);
  if (arena.used() > args->scratch_bytes) {
    info[0] = arena.used();
    info[1] = args->scratch_bytes;
    return MOE_SCRATCH_TOO_SMALL;
  }
  const int32_t status = moe::route(layer.routing, *args, info);
  if (status != MOE_OK) return status;
  layer.make_schedule();
  moe::parallel(layer.team_size(), [&](int rank, int) { layer.work(rank); });
  return MOE_OK;
}
