// Building blocks of a stable counting sort of expert ids by a team: every member counts its share of the flattened ids, the counts are turned into
// write positions per (expert, member), and every member writes its share again. Shares are in rank order, so positions stay ascending within an
// expert for any size of the team.
#pragma once

#include <cstdint>

#include "runtime/parallel.h"

namespace moe {

// [tokens, topk] ids of any strides (in elements), read in flat order.
template <class Id>
struct IdView {
  const Id* data;
  int64_t topk, stride_token, stride_slot;

  // visit(flat position, id) for every position of the share; stops early and returns false when visit does.
  template <class Visit>
  bool for_each(Share share, Visit&& visit) const {
    if (stride_slot == 1 && stride_token == topk) {
#pragma GCC unroll 8  // a visit is a handful of instructions
      for (int64_t flat = share.begin; flat < share.end; ++flat) {
        if (!visit(flat, static_cast<int64_t>(data[flat]))) return false;
      }
      return true;
    }
    if (share.begin >= share.end) return true;
    int64_t token = share.begin / topk, slot = share.begin % topk;
    for (int64_t flat = share.begin; flat < share.end; ++flat) {
      if (!visit(flat, static_cast<int64_t>(data[token * stride_token + slot * stride_slot]))) return false;
      if (++slot == topk) {
        slot = 0;
        ++token;
      }
    }
    return true;
  }
};

// The first id that names no expert and is not -1; `flat` is -1 when there is none.
struct BadId {
  int64_t flat, value;
};

// Adds the share's ids to counts[0 .. experts], where counts[id + 1] belongs to expert `id` and counts[0] to "no expert": one comparison then covers
// both the -1 and the range. Stops at the first bad id.
template <class Id>
BadId count_ids(const IdView<Id>& ids, Share share, int64_t experts, int32_t* counts) {
  BadId bad = {-1, 0};
  ids.for_each(share, [&](int64_t flat, int64_t id) {
    const uint64_t slot = static_cast<uint64_t>(id) + 1;
    if (slot > static_cast<uint64_t>(experts)) {
      bad = {flat, id};
      return false;
    }
    ++counts[slot];
    return true;
  });
  return bad;
}

// For the experts of the share: counts[rank * stride + e] of every member becomes the sum over the members before it, totals[e] the sum over all.
inline void scan_members(int32_t* counts, int64_t stride, int team, Share experts, int32_t* totals) {
  for (int64_t e = experts.begin; e < experts.end; ++e) totals[e] = 0;
  for (int rank = 0; rank < team; ++rank) {
    int32_t* const own = counts + rank * stride;
    for (int64_t e = experts.begin; e < experts.end; ++e) {
      const int32_t count = own[e];
      own[e] = totals[e];
      totals[e] += count;
    }
  }
}

// sorted[next[id]++] = flat position, for every id of the share that names an expert.
template <class Id>
void scatter_positions(const IdView<Id>& ids, Share share, int32_t* next, int32_t* sorted) {
  ids.for_each(share, [&](int64_t flat, int64_t id) {
    if (id >= 0) sorted[next[id]++] = static_cast<int32_t>(flat);
    return true;
  });
}

}  // namespace moe
