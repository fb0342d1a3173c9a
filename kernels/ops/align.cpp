// moe_align_block_size: group the flattened ids by expert and pad every group to whole blocks.
//
// Two passes over the ids (count, then write), one over the outputs. A member writes to shared memory only where its own runs lie, so a cache line
// changes hands at the two ends of a run and nowhere else.
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

// Written by one member, read by all: a cache line each.
struct alignas(kCacheLine) Found {
  BadId bad;
};

// Row stride of the counts: slot 0 is "no expert", and rows do not share lines.
int64_t count_stride(int64_t experts) { return round_up(experts + 1, kLineInts); }

// The pieces of the caller's scratch memory, in the order of moe_align_scratch_bytes.
struct Scratch {
  Barrier* barrier;
  Found* found;     // [threads]
  int32_t* counts;  // [threads][count_stride]
  int32_t* totals;  // [experts] ids of each
  int32_t* blocks;  // [experts] blocks of each

  Scratch(void* memory, int64_t experts, int threads) {
    const uintptr_t begin = round_up(reinterpret_cast<uintptr_t>(memory), kCacheLine);
    barrier = reinterpret_cast<Barrier*>(begin);
    found = reinterpret_cast<Found*>(barrier + 1);
    counts = reinterpret_cast<int32_t*>(found + threads);
    totals = counts + threads * count_stride(experts);
    blocks = totals + count_stride(experts);
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

// Block ids and padding that fall into this member's shares of the outputs; `next` goes from "ids before mine in this expert" to "where mine go".
void place_blocks(const Problem& p, const Scratch& s, int rank, int team, int32_t* next) {
  const Share own_blocks = share_of(p.blocks_len, rank, team), own_experts = share_of(p.experts, rank, team);
  const int32_t padding = static_cast<int32_t>(p.numel);
  int64_t block = 0;
  for (int64_t e = 0; e < p.experts; ++e) {
    const int64_t first = block * p.block_size;
    next[e] += static_cast<int32_t>(first);
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

// Every member returns the same: the first bad id of all, found before anything was written, or flat = -1.
template <class Id>
BadId sort_share(const Problem& p, const IdView<Id>& ids, const Scratch& s, int rank, int team) {
  const int64_t stride = count_stride(p.experts);
  const Share own = share_of(p.numel, rank, team);
  int32_t* const counts = s.counts + rank * stride;
  std::memset(counts, 0, static_cast<size_t>(p.experts + 1) * sizeof *counts);
  s.found[rank].bad = count_ids(ids, own, p.experts, counts);
  s.barrier->wait(team);
  for (int member = 0; member < team; ++member) {
    if (s.found[member].bad.flat >= 0) return s.found[member].bad;
  }
  const Share experts = share_of(p.experts, rank, team);
  scan_members(s.counts + 1, stride, team, experts, s.totals);
  for (int64_t e = experts.begin; e < experts.end; ++e) s.blocks[e] = static_cast<int32_t>(ceil_div(s.totals[e], p.block_size));
  s.barrier->wait(team);
  place_blocks(p, s, rank, team, counts + 1);
  scatter_positions(ids, own, counts + 1, p.sorted);
  return {-1, 0};
}

template <class Id>
BadId sort_all(const Problem& p, const IdView<Id>& ids, const Scratch& s, int threads) {
  new (s.barrier) Barrier();
  BadId bad = {-1, 0};
  parallel(threads, [&](int rank, int team) {
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

int64_t moe_align_scratch_bytes(int64_t num_experts, int32_t threads) {
  using namespace moe;
  const int64_t experts = std::min(std::max<int64_t>(num_experts, 0), kLargest), members = std::max(threads, 1);
  return kCacheLine + sizeof(Barrier) + members * static_cast<int64_t>(sizeof(Found)) +
         (members + 2) * count_stride(experts) * static_cast<int64_t>(sizeof(int32_t));
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
  const Scratch pieces(scratch, num_experts, std::max(threads, 1));
  const int64_t work = numel + (sorted_len - numel) / kPaddingPerId;
  const int members = static_cast<int>(std::min<int64_t>(threads, work / kIdsPerMember));
  const BadId bad = ids_dtype == MOE_I64
                        ? sort_all(problem, IdView<int64_t>{static_cast<const int64_t*>(ids), topk, stride_token, stride_slot}, pieces, members)
                        : sort_all(problem, IdView<int32_t>{static_cast<const int32_t*>(ids), topk, stride_token, stride_slot}, pieces, members);
  if (bad.flat < 0) return MOE_OK;
  info[2] = num_experts;
  return refuse(info, MOE_BAD_EXPERT_ID, bad.flat, bad.value);
}
