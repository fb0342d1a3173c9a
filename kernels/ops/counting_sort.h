// Building blocks of a stable counting sort of expert ids by a team. The flattened ids are cut into parts; whoever has a part sorts it by itself, the
// parts' counts then say where its runs go, and every run is copied there. Parts are in order, so positions stay ascending within an expert for any
// number of them.
//
// A part is sorted in two passes, and in neither does a store's address hang on a load that an earlier store may have to feed: with the usual
// `sorted[next[id]++] = position`, processors wait for one another's addresses, six times as long.
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

// Adds the part's ids to counts[0 .. experts], where counts[id + 1] belongs to expert `id` and counts[0] to "no expert": one comparison then covers
// both the -1 and the range. ranks[i] becomes the number of the part's ids before its i-th that are the same. Stops at the first bad id.
template <class Id>
BadId count_ids(const IdView<Id>& ids, Share part, int64_t experts, int32_t* counts, int32_t* ranks) {
  BadId bad = {-1, 0};
  ids.for_each(part, [&](int64_t flat, int64_t id) {
    const uint64_t slot = static_cast<uint64_t>(id) + 1;
    if (slot > static_cast<uint64_t>(experts)) {
      bad = {flat, id};
      return false;
    }
    ranks[flat - part.begin] = counts[slot]++;
    return true;
  });
  return bad;
}

// begins[slot] = sum of the counts before it.
inline void sum_before(const int32_t* counts, int64_t slots, int32_t* begins) {
  int32_t sum = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    begins[slot] = sum;
    sum += counts[slot];
  }
}

// The part's positions, grouped by slot.
template <class Id>
void group_positions(const IdView<Id>& ids, Share part, const int32_t* begins, const int32_t* ranks, int32_t* grouped) {
  ids.for_each(part, [&](int64_t flat, int64_t id) {
    grouped[begins[id + 1] + ranks[flat - part.begin]] = static_cast<int32_t>(flat);
    return true;
  });
}

// For the experts of the share: counts[part * stride + e] of every part becomes the sum over the parts before it, totals[e] the sum over all.
inline void scan_parts(int32_t* counts, int64_t stride, int64_t parts, Share experts, int32_t* totals) {
  for (int64_t e = experts.begin; e < experts.end; ++e) totals[e] = 0;
  for (int64_t part = 0; part < parts; ++part) {
    int32_t* const own = counts + part * stride;
    for (int64_t e = experts.begin; e < experts.end; ++e) {
      const int32_t count = own[e];
      own[e] = totals[e];
      totals[e] += count;
    }
  }
}

}  // namespace moe
