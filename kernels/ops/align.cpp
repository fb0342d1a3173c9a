// moe_align_block_size: group the flattened ids by expert and pad every group to whole blocks.
//
// Every member sorts its parts of the ids in its own cache; one pass then copies their runs to the outputs. A member writes to shared memory only
// where its own runs lie, so a cache line changes hands at the two ends of a run and nowhere else.
#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "moe/c_api.h"
#include "moe/layout.h"
#include "ops/counting_sort.h"

namespace moe {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kLineInts = kCacheLine / sizeof(int32_t);
constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
// Starting a team costs about as much as sorting this many ids: a member that would get fewer stays away.
constexpr int64_t kIdsPerMember = 8192;
constexpr int64_t kPaddingPerId = 8;  // padding is written 16 bytes at a time, ids are sorted one by one

// Ids of one part: with its ranks and grouped positions it fits in a core's L2 beside those of a neighbour thread.
constexpr int64_t kPartIds = 32768;
// Ids per expert in a part, at the least: what is kept for each part and expert must not outgrow the ids.
constexpr int64_t kPartIdsPerExpert = 4;

// Written by one member, read by all: a cache line each.
struct alignas(kCacheLine) Found {
  BadId bad;
};

// Row stride of what a part keeps for each expert: slot 0 is "no expert", one more ends the last run, and rows do not share lines.
int64_t slot_stride(int64_t experts) { return round_up(experts + 2, kLineInts); }

int64_t largest_part(int64_t experts) { return std::max(kPartIds, kPartIdsPerExpert * experts); }

int part_count(int64_t numel, int64_t experts, int team) { return static_cast<int>(std::max<int64_t>(team, ceil_div(numel, largest_part(experts)))); }

int team_size(int64_t numel, int64_t sorted_len, int threads) {
  const int64_t work = numel + (sorted_len - numel) / kPaddingPerId;
  return static_cast<int>(std::max<int64_t>(std::min<int64_t>(threads, work / kIdsPerMember), 1));
}

// The pieces of the caller's scratch memory.
struct Scratch {
  Barrier* barrier;
  Found* found;      // [team]
  int32_t* counts;   // [parts][slot_stride] ids of each slot; then those of the parts before, for each expert
  int32_t* begins;   // [parts][slot_stride] where each slot's run begins in its part
  int32_t* starts;   // [team][slot_stride] where each expert's ids begin in the sorted list
  int32_t* totals;   // [experts] ids of each
  int32_t* blocks;   // [experts] blocks of each
  int32_t* ranks;    // [team][longest]
  int32_t* grouped;  // [numel] positions, in parts
  int64_t stride, longest;
  int parts;
  uintptr_t end;

  Scratch(void* memory, int64_t numel, int64_t experts, int team) : stride(slot_stride(experts)), parts(part_count(numel, experts, team)) {
    longest = round_up(ceil_div(numel, parts), kLineInts);
    end = round_up(reinterpret_cast<uintptr_t>(memory), kCacheLine);
    barrier = take<Barrier>(1);
    found = take<Found>(team);
    counts = take<int32_t>(parts * stride);
    begins = take<int32_t>(parts * stride);
    starts = take<int32_t>(team * stride);
    totals = take<int32_t>(stride);
    blocks = take<int32_t>(stride);
    ranks = take<int32_t>(team * longest);
    grouped = take<int32_t>(numel);
  }

  template <class T>
  T* take(int64_t count) {
    T* const piece = reinterpret_cast<T*>(end);
    end += static_cast<uintptr_t>(count) * sizeof(T);
    return piece;
  }
};

struct Problem {
  int64_t numel, block_size, experts, sorted_len, blocks_len;
  const int32_t* expert_map;
  int32_t *sorted, *expert_ids, *post_pad;

  int32_t mapped(int64_t expert) const { return expert_map ? expert_map[expert] : static_cast<int32_t>(expert); }
};

// The part of [begin, end) that lies in `share`.
Share overlap(Share share, int64_t begin, int64_t end) { return {std::max(share.begin, begin), std::min(share.end, end)}; }

void fill(int32_t* out, Share share, int32_t value) {
  if (share.begin < share.end) std::fill(out + share.begin, out + share.end, value);
}

// Block ids and padding that fall into this member's shares of the outputs; starts[e] becomes where expert e's ids begin.
void place_blocks(const Problem& p, const Scratch& s, int rank, int team, int32_t* starts) {
  const Share own_blocks = share_of(p.blocks_len, rank, team), own_experts = share_of(p.experts, rank, team);
  const int32_t padding = static_cast<int32_t>(p.numel);
  int64_t block = 0;
  for (int64_t e = 0; e < p.experts; ++e) {
    const int64_t first = block * p.block_size;
    starts[e] = static_cast<int32_t>(first);
    if (s.blocks[e] == 0) continue;
    block += s.blocks[e];
    fill(p.expert_ids, overlap(own_blocks, block - s.blocks[e], block), p.mapped(e));
    if (e >= own_experts.begin && e < own_experts.end) fill(p.sorted, {first + s.totals[e], block * p.block_size}, padding);
  }
  const int64_t used = block * p.block_size;
  fill(p.expert_ids, overlap(own_blocks, block, p.blocks_len), p.experts > 0 ? p.mapped(0) : 0);
  const Share tail = share_of(p.sorted_len - used, rank, team);
  fill(p.sorted, {used + tail.begin, used + tail.end}, padding);
  if (rank == 0) *p.post_pad = static_cast<int32_t>(used);
}

template <class Id>
BadId sort_part(const Problem& p, const IdView<Id>& ids, const Scratch& s, int part, int rank) {
  const Share own = share_of(p.numel, part, s.parts);
  int32_t *const counts = s.counts + part * s.stride, *const begins = s.begins + part * s.stride, *const ranks = s.ranks + rank * s.longest;
  std::memset(counts, 0, static_cast<size_t>(p.experts + 2) * sizeof *counts);
  const BadId bad = count_ids(ids, own, p.experts, counts, ranks);
  if (bad.flat >= 0) return bad;
  sum_before(counts, p.experts + 2, begins);
  group_positions(ids, own, begins, ranks, s.grouped + own.begin);
  return bad;
}

void copy_runs(const Problem& p, const Scratch& s, int part, const int32_t* starts) {
  const int32_t *const before = s.counts + part * s.stride + 1, *const begins = s.begins + part * s.stride + 1;
  const int32_t* const grouped = s.grouped + share_of(p.numel, part, s.parts).begin;
  for (int64_t e = 0; e < p.experts; ++e) {
    const int32_t count = begins[e + 1] - begins[e];
    if (count > 0) std::memcpy(p.sorted + starts[e] + before[e], grouped + begins[e], static_cast<size_t>(count) * sizeof *grouped);
  }
}

// Every member returns the same: the first bad id of all, found before anything was written, or flat = -1.
template <class Id>
BadId sort_share(const Problem& p, const IdView<Id>& ids, const Scratch& s, int rank, int team) {
  const Share own = share_of(s.parts, rank, team);
  BadId bad = {-1, 0};
  for (int64_t part = own.begin; part < own.end && bad.flat < 0; ++part) bad = sort_part(p, ids, s, static_cast<int>(part), rank);
  s.found[rank].bad = bad;
  s.barrier->wait(team);
  for (int member = 0; member < team; ++member) {
    if (s.found[member].bad.flat >= 0) return s.found[member].bad;
  }
  const Share experts = share_of(p.experts, rank, team);
  scan_parts(s.counts + 1, s.stride, s.parts, experts, s.totals);
  for (int64_t e = experts.begin; e < experts.end; ++e) s.blocks[e] = static_cast<int32_t>(ceil_div(s.totals[e], p.block_size));
  s.barrier->wait(team);
  int32_t* const starts = s.starts + rank * s.stride;
  place_blocks(p, s, rank, team, starts);
  for (int64_t part = own.begin; part < own.end; ++part) copy_runs(p, s, static_cast<int>(part), starts);
  return bad;
}

template <class Id>
BadId sort_all(const Problem& p, const IdView<Id>& ids, const Scratch& s, int team_wanted) {
  new (s.barrier) Barrier();
  BadId bad = {-1, 0};
  parallel(team_wanted, [&](int rank, int team) {
    const BadId mine = sort_share(p, ids, s, rank, team);
    if (rank == 0) bad = mine;
  });
  return bad;
}

int32_t refuse(int64_t info[4], int32_t status, int64_t first, int64_t second) {
  info[0] = first;
  info[1] = second;
  return status;
}

}  // namespace
}  // namespace moe

int64_t moe_align_scratch_bytes(int64_t numel, int64_t sorted_len, int64_t num_experts, int32_t threads) {
  using namespace moe;
  for (int64_t* size : {&numel, &sorted_len, &num_experts}) *size = std::min(std::max<int64_t>(*size, 0), kLargest);
  const Scratch pieces(nullptr, numel, num_experts, team_size(numel, sorted_len, threads));
  return kCacheLine + static_cast<int64_t>(pieces.end);
}

int32_t moe_align_block_size(const void* ids, int32_t ids_dtype, int64_t tokens, int64_t topk, int64_t stride_token, int64_t stride_slot,
                             int64_t block_size, int64_t num_experts, const int32_t* expert_map, int64_t sorted_len, int64_t blocks_len,
                             int32_t* sorted_token_ids, int32_t* expert_ids, int32_t* num_tokens_post_pad, void* scratch, int32_t threads,
                             int64_t info[4]) {
  using namespace moe;
  enum Argument { kIdsDtype = 2, kTokens = 3, kTopk = 4, kBlockSize = 7, kNumExperts = 8, kSortedLen = 10, kBlocksLen = 11 };
  if (ids_dtype != MOE_I32 && ids_dtype != MOE_I64) return refuse(info, MOE_BAD_ARGUMENT, kIdsDtype, 0);
  if (tokens < 0) return refuse(info, MOE_BAD_ARGUMENT, kTokens, 0);
  if (topk < 0) return refuse(info, MOE_BAD_ARGUMENT, kTopk, 0);
  if (block_size < 1) return refuse(info, MOE_BAD_ARGUMENT, kBlockSize, 0);
  if (num_experts < 0) return refuse(info, MOE_BAD_ARGUMENT, kNumExperts, 0);

  // Positions, their padding value and block numbers are int32.
  int64_t numel, slack, longest;
  constexpr int64_t kOverflow = std::numeric_limits<int64_t>::max();
  if (__builtin_mul_overflow(tokens, topk, &numel)) numel = kOverflow;
  if (__builtin_mul_overflow(num_experts, block_size - 1, &slack)) slack = kOverflow;
  if (__builtin_add_overflow(numel, slack, &longest)) longest = kOverflow;
  for (const int64_t size : {longest, sorted_len, num_experts, block_size}) {
    if (size > kLargest) return refuse(info, MOE_TOO_LARGE, size, kLargest);
  }
  if (sorted_len < longest) return refuse(info, MOE_BAD_ARGUMENT, kSortedLen, 0);
  if (blocks_len != ceil_div(sorted_len, block_size)) return refuse(info, MOE_BAD_ARGUMENT, kBlocksLen, 0);

  const Problem problem = {numel, block_size, num_experts, sorted_len, blocks_len, expert_map, sorted_token_ids, expert_ids, num_tokens_post_pad};
  const int team = team_size(numel, sorted_len, threads);
  const Scratch pieces(scratch, numel, num_experts, team);
  const BadId bad = ids_dtype == MOE_I64
                        ? sort_all(problem, IdView<int64_t>{static_cast<const int64_t*>(ids), topk, stride_token, stride_slot}, pieces, team)
                        : sort_all(problem, IdView<int32_t>{static_cast<const int32_t*>(ids), topk, stride_token, stride_slot}, pieces, team);
  if (bad.flat < 0) return MOE_OK;
  info[2] = num_experts;
  return refuse(info, MOE_BAD_EXPERT_ID, bad.flat, bad.value);
}
