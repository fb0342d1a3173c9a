#include "ops/layer_plan.h"

#include <algorithm>
#include <new>

namespace moe {
namespace {

constexpr int64_t kSumRows = 64;  // rows that one weighted-sum task adds, about: 256 KiB read

}  // namespace

Layer::Layer(const moe_layer_args& a, const KernelTable& t, int threads)
    : args(a), table(t), machine{threads, std::max<int64_t>(moe_cache_bytes(2), int64_t{1} << 19)}, gated(a.gate_layout != MOE_UNGATED) {
  w1_count = w1_panels(args.intermediate, gated);
  w2_count = w2_panels(args.hidden);
  k_steps = steps_of(args.hidden);
  i_steps = steps_of(args.intermediate);
  pairs = args.tokens * (args.mode == MOE_BATCHED ? args.experts : args.topk);
  if (!cut_to(memory_promised(pairs, args.hidden, args.intermediate))) {
    // Rows of fewer than 192 columns may exceed the promise as they are, however finely their work is cut. Threads get their part of it nevertheless.
    cut_to(bytes + memory_promised(0, 0, 0));
  }
  machine.threads = cut.threads;
}

bool Layer::cut_to(int64_t most_bytes) {
  for (int notch = 0;; ++notch) {
    cut = cut_at(notch, args.tokens, table.block_rows, table.f32_blocks, machine);
    // More slices cost less than fewer rows a task, for which panels are read more often.
    for (int64_t least : {1, 4, 8, 16}) {
      slices = args.mode == MOE_REDUCED ? column_slices(pairs, args.hidden, least) : Slices{1, w2_count};
      Arena measure(nullptr, 0);
      lay_out(measure);
      bytes = measure.used();
      if (bytes <= most_bytes) return true;
    }
    if (cut.threads == 1 && cut.rows.task == 1) return false;
  }
}

void Layer::lay_out(void* scratch) {
  Arena arena(scratch, bytes);
  lay_out(arena);
}

void Layer::lay_out(Arena& arena) {
  moe::lay_out(routing, args, arena);
  moe::lay_out(first, args.experts, arena);
  moe::lay_out(second, args.experts, arena);
  first_done = arena.take<std::atomic<int64_t>>(args.experts);
  schedule = arena.take<Schedule>(1);
  h = arena.take<uint16_t>(pairs * i_steps * kStep + table.read_slack / static_cast<int64_t>(sizeof(uint16_t)));
  for (int64_t i = 0; i < 2; ++i) y[i] = args.mode == MOE_REDUCED && i < slices.alive() ? arena.take<float>(pairs * slice_columns()) : nullptr;
  Hand hand;
  Arena measure(nullptr, 0);
  lay_out(hand, measure);
  const int64_t hand_bytes = measure.used();
  hands = arena.take<Hand>(cut.threads);
  char* const memory = arena.take<char>(cut.threads * hand_bytes);
  for (int i = 0; memory && i < cut.threads; ++i) {
    Arena own(memory + i * hand_bytes, hand_bytes);
    lay_out(*new (&hands[i]) Hand, own);
  }
}

void Layer::lay_out(Hand& hand, Arena& arena) const {
  const int64_t rows = std::min(pairs, cut.rows.task), step_bytes = rows * kStep * element_bytes();
  // Rows of h are held to be widened only; a block of k is less than a step too long for the cache.
  const int64_t whole_bytes = (table.f32_blocks ? std::max(k_steps, i_steps) : k_steps) * step_bytes;
  const int64_t a_bytes = cut.whole ? whole_bytes : std::min(whole_bytes, cut.cached_bytes + step_bytes);
  hand.a = arena.take<char>(a_bytes + table.read_slack);
  hand.sums = arena.take<float>(sums_elements(table, rows, cut.rows.block));
  hand.sum_rows = arena.take<const float*>(args.topk);
  hand.sum_weights = arena.take<float>(args.topk);
  hand.held_rows = nullptr;
}

int64_t Layer::sum_parts() const { return ceil_div(slice_columns(), kSumColumns); }
int64_t Layer::sum_tokens() const { return std::max<int64_t>(kSumRows / std::max<int64_t>(args.topk, 1), 1); }
int64_t Layer::sum_tasks() const { return sum_parts() * ceil_div(args.tokens, sum_tokens()); }

void Layer::make_schedule() {
  plan(first, routing, w1_count, k_steps, cut.rows, machine);
  plan(second, routing, slices.panels, i_steps, cut.rows, machine);
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

Place Layer::next_place() const {
  const int64_t task = schedule->take();
  if (task >= schedule->task_count) return {TaskKind::kNone, 0, 0, {}};
  const Phase& phase = schedule->phase_of(task);
  Place place{phase.kind, phase.slice, task - phase.begin, {}};
  if (phase.kind == TaskKind::kFirst) place.product = task_at(first, routing, place.index);
  if (phase.kind == TaskKind::kSecond) {
    place.product = task_at(second, routing, place.index);
    // The last slice may be narrower, and some of its tasks empty.
    place.product.last_panel = std::min(place.product.last_panel, w2_count - place.slice * slices.panels);
  }
  return place;
}

Following Layer::following(const Place& place) const {
  const ProductTask& task = place.product;
  const auto block_bytes = [&](int64_t steps) { return k_block(task.rows, steps) * kPanelStep * static_cast<int64_t>(sizeof(uint16_t)); };
  if (place.kind == TaskKind::kFirst) {
    return {args.w1 + (routing.active[task.active] * w1_count + task.first_panel) * panel_elements(args.hidden), block_bytes(k_steps)};
  }
  if (place.kind == TaskKind::kSecond && task.first_panel < task.last_panel) {
    const int64_t panel = routing.active[task.active] * w2_count + place.slice * slices.panels + task.first_panel;
    return {args.w2 + panel * panel_elements(args.intermediate), block_bytes(i_steps)};
  }
  return {};
}

int Layer::team_size() const {
  const int64_t weights = w1_count * panel_elements(args.hidden) + w2_count * panel_elements(args.intermediate);
  return useful_threads(routing.active_count * weights * 2, routing.offsets[args.experts] * weights * 2, cut.threads);
}

}  // namespace moe
