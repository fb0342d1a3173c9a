// Which rows each local expert gets: a stable counting sort of the (token, slot) pairs.
#pragma once

#include <cstdint>

#include "moe/c_api.h"
#include "runtime/arena.h"

namespace moe {

struct Routing {
  int32_t* local;       // [tokens * topk] local expert of every pair, -1 = skipped; null for a batched layer
  int32_t* ranks;       // [tokens * topk] pairs of the same expert before this one; null for a batched layer
  int32_t* rows;        // [tokens * topk] flat positions grouped by expert, ascending within one
  int64_t* offsets;     // [experts + 1] where each expert's group begins in `rows`
  int32_t* active;      // [experts] those with rows, most rows first
  int64_t active_count;
  bool skipped;         // some pair is skipped

  int64_t rows_of(int64_t expert) const { return offsets[expert + 1] - offsets[expert]; }
};

void lay_out(Routing& routing, const moe_layer_args& args, Arena& arena);

// Fills `routing` from the ids, or from expert_num_tokens. Every id is checked before anything else is touched.
int32_t route(Routing& routing, const moe_layer_args& args, int64_t info[4]);

}  // namespace moe
