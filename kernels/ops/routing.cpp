#include "ops/routing.h"

#include <algorithm>
#include <cstring>

namespace moe {
namespace {

// Local expert of every pair, its rank among that expert's pairs, and how many pairs each expert has (in offsets[expert + 1]). With the ranks, no
// store of the second pass has an address that an earlier one may have to feed; counting on in the offsets there takes twice as long.
template <class Id>
int32_t count(Routing& routing, const moe_layer_args& args, int64_t info[4]) {
  const Id* ids = static_cast<const Id*>(args.topk_ids);
  for (int64_t token = 0; token < args.tokens; ++token) {
    for (int64_t slot = 0; slot < args.topk; ++slot) {
      const int64_t id = ids[token * args.ids_stride_token + slot * args.ids_stride_slot];
      const int64_t flat = token * args.topk + slot;
      int64_t local = id;
      if (id != -1) {
        if (id < 0 || id >= args.global_experts) {
          info[0] = flat;
          info[1] = id;
          info[2] = args.global_experts;
          return MOE_BAD_EXPERT_ID;
        }
        if (args.expert_map) local = args.expert_map[id];
        if (local < -1 || local >= args.experts) {
          info[0] = id;
          info[1] = local;
          info[2] = args.experts;
          return MOE_BAD_EXPERT_MAP;
        }
      }
      if (local < 0) {
        routing.skipped = true;
      } else {
        routing.ranks[flat] = static_cast<int32_t>(routing.offsets[local + 1]++);
      }
      routing.local[flat] = static_cast<int32_t>(local);
    }
  }
  return MOE_OK;
}

int32_t count_batched(Routing& routing, const moe_layer_args& args, int64_t info[4]) {
  for (int64_t expert = 0; expert < args.experts; ++expert) {
    const int64_t tokens = args.expert_num_tokens[expert];
    if (tokens < 0 || tokens > args.tokens) {
      info[0] = expert;
      info[1] = tokens;
      info[2] = args.tokens;
      return MOE_BAD_TOKEN_COUNT;
    }
    routing.offsets[expert + 1] = tokens;
  }
  return MOE_OK;
}

}  // namespace

void lay_out(Routing& routing, const moe_layer_args& args, Arena& arena) {
  const bool batched = args.mode == MOE_BATCHED;
  const int64_t pairs = args.tokens * (batched ? args.experts : args.topk);
  routing.local = batched ? nullptr : arena.take<int32_t>(pairs);
  routing.ranks = batched ? nullptr : arena.take<int32_t>(pairs);
  routing.rows = arena.take<int32_t>(pairs);
  routing.offsets = arena.take<int64_t>(args.experts + 1);
  routing.active = arena.take<int32_t>(args.experts);
  routing.active_count = 0;
  routing.skipped = false;
}

int32_t route(Routing& routing, const moe_layer_args& args, int64_t info[4]) {
  int64_t* const offsets = routing.offsets;
  std::memset(offsets, 0, static_cast<size_t>(args.experts + 1) * sizeof *offsets);
  const int32_t status = args.mode == MOE_BATCHED    ? count_batched(routing, args, info)
                         : args.ids_dtype == MOE_I64 ? count<int64_t>(routing, args, info)
                                                     : count<int32_t>(routing, args, info);
  if (status != MOE_OK) return status;
  for (int64_t expert = 0; expert < args.experts; ++expert) {
    if (offsets[expert + 1] > 0) routing.active[routing.active_count++] = static_cast<int32_t>(expert);
  }
  std::sort(routing.active, routing.active + routing.active_count,
            [offsets](int32_t a, int32_t b) { return offsets[a + 1] != offsets[b + 1] ? offsets[a + 1] > offsets[b + 1] : a < b; });
  for (int64_t expert = 0; expert < args.experts; ++expert) offsets[expert + 1] += offsets[expert];
  if (args.mode == MOE_BATCHED) {
    for (int64_t expert = 0; expert < args.experts; ++expert) {
      for (int64_t i = 0; i < routing.rows_of(expert); ++i) routing.rows[offsets[expert] + i] = static_cast<int32_t>(expert * args.tokens + i);
    }
    return MOE_OK;
  }
  for (int64_t flat = 0; flat < args.tokens * args.topk; ++flat) {
    const int32_t expert = routing.local[flat];
    if (expert >= 0) routing.rows[offsets[expert] + routing.ranks[flat]] = static_cast<int32_t>(flat);
  }
  return MOE_OK;
}

}  // namespace moe
