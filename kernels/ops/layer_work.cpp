#include "ops/layer_work.h"

#include <emmintrin.h>

#include <algorithm>
#include <cstring>

#include "moe/panel_rows.h"
#include "ops/layer_args.h"
#include "ops/router_weights.h"

namespace moe {
namespace {

// One member of the team.
struct Worker {
  const Layer& layer;
  const moe_layer_args& args;
  const KernelTable& table;
  Hand& hand;

  void run_all() {
    table.enter();
    Place following;
    for (Place place = layer.next_place(); place.kind != TaskKind::kNone; place = following) {
      following = layer.next_place();
      switch (place.kind) {
        case TaskKind::kNone:
          break;
        case TaskKind::kZero:
          zero_skipped(place.index);
          break;
        case TaskKind::kFirst:
          first_product(place.product, layer.following(following));
          break;
        case TaskKind::kSecond:
          second_product(place.product, place.slice, layer.following(following));
          break;
        case TaskKind::kSum:
          weighted_sum(place.index, place.slice);
          break;
      }
    }
    table.leave();
  }

  // h = activation(x w1^T + b1) for some rows and neurons of one expert.
  void first_product(const ProductTask& task, const Following& following) {
    const int64_t expert = layer.routing.active[task.active];
    uint16_t* const h_rows = h_of(task);
    const int64_t panel_neurons = layer.gated ? kTileCols : kPanelCols;
    const ExpertGemm gemm = product(task, layer.k_steps, args.w1 + expert * layer.w1_count * panel_elements(args.hidden), following);
    const auto hold = [&](int64_t step, int64_t steps) { return layer.cut.whole ? gathered(task, 0, layer.k_steps) : gathered(task, step, steps); };
    run(gemm, hold, [&](int64_t panel, int64_t first_row, int rows, const float* sums) {
      float bias[kPanelCols];
      if (args.w1_bias) panel_bias(bias, expert, panel);
      uint16_t* const block = h_rows + first_row * layer.i_steps * kStep;
      table.activate({sums, args.w1_bias ? bias : nullptr, rows, args.activation, block, panel * panel_neurons});
      clear_padding(block, rows, panel * panel_neurons, (panel + 1) * panel_neurons);
    });
    layer.first_done[task.active].fetch_add(1, std::memory_order_release);
  }

  // y = h w2^T + b2 for some rows and columns of one expert, at the rows' flat positions.
  void second_product(const ProductTask& task, int slice, const Following& following) {
    const int64_t expert = layer.routing.active[task.active], slice_panel = slice * layer.slices.panels;
    wait_for(layer.first_done[task.active], layer.first.before[task.active + 1] - layer.first.before[task.active]);
    const bool reduced = args.mode == MOE_REDUCED;
    if (reduced && slice >= 2) wait_for(layer.schedule->sum_done[slice - 2], layer.sum_tasks());
    void* const out = reduced ? layer.y[slice % 2] : args.out;
    const bool streamed = reduced && worth_streaming(layer.pairs * layer.slice_columns() * static_cast<int64_t>(sizeof(float)), layer.machine);
    const int64_t row_size = reduced ? layer.slice_columns() : args.hidden;
    const int32_t* const flat = rows_of(task);
    const ExpertGemm gemm =
        product(task, layer.i_steps, args.w2 + (expert * layer.w2_count + slice_panel) * panel_elements(args.intermediate), following);
    const auto hold = [&](int64_t step, int64_t steps) {
      if (!table.f32_blocks) return HeldRows{reinterpret_cast<const char*>(h_of(task)), 0, layer.i_steps};
      return layer.cut.whole ? widened(task, 0, layer.i_steps) : widened(task, step, steps);
    };
    run(gemm, hold, [&](int64_t panel, int64_t first_row, int rows, const float* sums) {
      const int64_t column = (slice_panel + panel) * kPanelCols;
      int64_t offsets[64];
      for (int r = 0; r < rows; ++r) offsets[r] = flat[first_row + r] * row_size + panel * kPanelCols;
      const float* const bias = args.w2_bias ? args.w2_bias + expert * args.hidden + column : nullptr;
      const int columns = static_cast<int>(std::min<int64_t>(kPanelCols, args.hidden - column));
      table.store({sums, bias, rows, columns, reduced ? int32_t{MOE_F32} : args.x_dtype, out, offsets, streamed});
    });
    if (streamed) _mm_sfence();  // streaming stores are weakly ordered: they must be visible before the count below
    layer.schedule->second_done[slice].fetch_add(1, std::memory_order_release);
  }

  ExpertGemm product(const ProductTask& task, int64_t steps, const uint16_t* panels, const Following& following) const {
    return {&table,    task.rows, layer.cut.rows.block, steps, panels, task.first_panel, task.last_panel, layer.k_block(task.rows, steps),
            hand.sums, following};
  }

  // Flat positions of the task's rows.
  const int32_t* rows_of(const ProductTask& task) const {
    return layer.routing.rows + layer.routing.offsets[layer.routing.active[task.active]] + task.first_row;
  }
  uint16_t* h_of(const ProductTask& task) const { return layer.h + (rows_of(task) - layer.routing.rows) * layer.i_steps * kStep; }

  // Whether the hand held these rows already; it does so now. Consecutive tasks of a thread often share them.
  bool holds(const void* rows, int64_t step) {
    const bool held = hand.held_rows == rows && hand.held_step == step;
    hand.held_rows = rows;
    hand.held_step = step;
    return held;
  }

  // Rows of x that the task needs.
  HeldRows gathered(const ProductTask& task, int64_t step, int64_t steps) {
    const HeldRows held{hand.a, step, steps};
    const int32_t* const flat = rows_of(task);
    if (holds(flat, step)) return held;
    const int64_t expert = layer.routing.active[task.active];
    const void* const x = static_cast<const char*>(args.x) + step * kStep * dtype_bytes(args.x_dtype);
    const int64_t k = std::min(args.hidden - step * kStep, steps * kStep);
    int64_t offsets[64];
    for (int64_t row = 0; row < task.rows; row += layer.cut.rows.block) {
      const int rows = static_cast<int>(std::min<int64_t>(layer.cut.rows.block, task.rows - row));
      for (int r = 0; r < rows; ++r) {
        offsets[r] = args.mode == MOE_BATCHED ? expert * args.x_stride_expert + (flat[row + r] - expert * args.tokens) * args.x_stride_token
                                              : flat[row + r] / args.topk * args.x_stride_token;
      }
      table.gather({x, args.x_dtype, offsets, rows, k, hand.a + row * steps * kStep * layer.element_bytes()});
    }
    return held;
  }

  // Rows of h that the task needs, for products that take float32.
  HeldRows widened(const ProductTask& task, int64_t step, int64_t steps) {
    const HeldRows held{hand.a, step, steps};
    const uint16_t* const h_rows = h_of(task);
    if (holds(h_rows, step)) return held;
    float* const a = reinterpret_cast<float*>(hand.a);
    for (int64_t row = 0; row < task.rows; row += layer.cut.rows.block) {
      const int64_t rows = std::min<int64_t>(layer.cut.rows.block, task.rows - row);
      table.widen(h_rows + (row * layer.i_steps + step * rows) * kStep, a + row * steps * kStep, rows * steps * kStep);
    }
    return held;
  }

  // The 32 biases of a panel, in its column order; padding columns have none.
  void panel_bias(float* bias, int64_t expert, int64_t panel) const {
    const int64_t width = layer.gated ? 2 * args.intermediate : args.intermediate;
    for (int64_t column = 0; column < kPanelCols; ++column) {
      const int64_t row = dense_row(args.gate_layout, width, panel, column);
      bias[column] = row < 0 ? 0.0f : args.w1_bias[expert * width + row];
    }
  }

  // Padding neurons come out as zero, except for a token with an infinity: its product with their zero weights is NaN, which w2's zeros would not
  // cancel.
  void clear_padding(uint16_t* block, int rows, int64_t first, int64_t last) const {
    for (int64_t neuron = std::max(first, args.intermediate); neuron < last; ++neuron) {
      for (int64_t row = 0; row < rows; ++row) block[neuron / kStep * rows * kStep + row * kStep + neuron % kStep] = 0;
    }
  }

  // out[token] = sum over its slots of weight * y[slot], for some tokens and columns.
  void weighted_sum(int64_t index, int slice) {
    wait_for(layer.schedule->second_done[slice], layer.second.total);
    const int64_t part = index % layer.sum_parts(), first_token = index / layer.sum_parts() * layer.sum_tokens();
    const int64_t last_token = std::min(first_token + layer.sum_tokens(), args.tokens);
    const int64_t begin = part * kSumColumns, column = slice * layer.slice_columns() + begin;
    const int64_t columns = std::min(std::min(kSumColumns, layer.slice_columns() - begin), args.hidden - column);
    for (int64_t token = first_token; token < last_token && columns > 0; ++token) {
      int slots = 0;
      for (int64_t slot = 0; slot < args.topk; ++slot) {
        const int64_t flat = token * args.topk + slot;
        if (layer.routing.local[flat] < 0) continue;
        hand.sum_rows[slots] = layer.y[slice % 2] + flat * layer.slice_columns() + begin;
        hand.sum_weights[slots++] = weight_at(args, token, slot);
      }
      void* const out = static_cast<char*>(args.out) + (token * args.hidden + column) * dtype_bytes(args.x_dtype);
      table.weighted_sum({hand.sum_rows, hand.sum_weights, slots, columns, args.x_dtype, out});
    }
    layer.schedule->sum_done[slice].fetch_add(1, std::memory_order_release);
  }

  void zero_skipped(int64_t index) const {
    const int64_t row_bytes = args.hidden * dtype_bytes(args.x_dtype);
    for (int64_t flat = index * kZeroRows; flat < std::min(layer.pairs, (index + 1) * kZeroRows); ++flat) {
      if (layer.routing.local[flat] < 0) std::memset(static_cast<char*>(args.out) + flat * row_bytes, 0, static_cast<size_t>(row_bytes));
    }
  }
};

}  // namespace

void work(const Layer& layer, int rank) { Worker{layer, layer.args, layer.table, layer.hands[rank]}.run_all(); }

}  // namespace moe
