#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "moe/c_api.h"

namespace {

constexpr int32_t kUntouched = -77;

struct Aligned {
  std::vector<int32_t> sorted, experts;
  int32_t post_pad = kUntouched;
  bool operator==(const Aligned& other) const { return sorted == other.sorted && experts == other.experts && post_pad == other.post_pad; }
};

// Ids in flat order, and where the tested function finds them.
struct Case {
  std::vector<int64_t> ids;
  int64_t tokens, topk, block_size, experts;
  const int32_t* expert_map = nullptr;
  bool pad_sorted = false;

  int64_t sorted_len() const {
    const int64_t length = tokens * topk + experts * (block_size - 1);
    return pad_sorted ? (length + block_size - 1) / block_size * block_size : length;
  }
  int64_t blocks_len() const { return (sorted_len() + block_size - 1) / block_size; }
};

// The contract, word for word: one expert after the other, one position after the other.
Aligned model(const Case& c) {
  const int64_t numel = c.tokens * c.topk;
  Aligned out;
  for (int64_t expert = 0; expert < c.experts; ++expert) {
    for (int64_t flat = 0; flat < numel; ++flat) {
      if (c.ids[static_cast<size_t>(flat)] == expert) out.sorted.push_back(static_cast<int32_t>(flat));
    }
    while (static_cast<int64_t>(out.sorted.size()) % c.block_size != 0) out.sorted.push_back(static_cast<int32_t>(numel));
    out.experts.resize(out.sorted.size() / static_cast<size_t>(c.block_size), static_cast<int32_t>(expert));
  }
  out.post_pad = static_cast<int32_t>(out.sorted.size());
  out.sorted.resize(static_cast<size_t>(c.sorted_len()), static_cast<int32_t>(numel));
  out.experts.resize(static_cast<size_t>(c.blocks_len()), 0);
  if (c.expert_map) {
    for (int32_t& expert : out.experts) expert = c.expert_map[expert];
  }
  return out;
}

enum Order { kContiguous, kPaddedRows, kColumns };

struct Answer {
  int32_t status;
  int64_t info[4];
  Aligned out;
};

template <class Id>
Answer run(const Case& c, Order order, int threads) {
  const int64_t stride_token = order == kContiguous ? c.topk : order == kPaddedRows ? c.topk + 3 : 1;
  const int64_t stride_slot = order == kColumns ? c.tokens + 1 : 1;
  std::vector<Id> stored(static_cast<size_t>(c.tokens * stride_token + c.topk * stride_slot + 1), Id{12345});
  for (int64_t flat = 0; flat < c.tokens * c.topk; ++flat) {
    stored[static_cast<size_t>(flat / c.topk * stride_token + flat % c.topk * stride_slot)] = static_cast<Id>(c.ids[static_cast<size_t>(flat)]);
  }
  Answer answer = {};
  answer.out.sorted.assign(static_cast<size_t>(c.sorted_len()), kUntouched);
  answer.out.experts.assign(static_cast<size_t>(c.blocks_len()), kUntouched);
  // Dirty, exactly large enough, and not on a cache line.
  std::vector<char> scratch(static_cast<size_t>(moe_align_scratch_bytes(c.tokens * c.topk, c.sorted_len(), c.experts, threads)), '\x5a');
  answer.status = moe_align_block_size(stored.data(), sizeof(Id) == 8 ? MOE_I64 : MOE_I32, c.tokens, c.topk, stride_token, stride_slot, c.block_size,
                                       c.experts, c.expert_map, c.sorted_len(), c.blocks_len(), answer.out.sorted.data(), answer.out.experts.data(),
                                       &answer.out.post_pad, scratch.data(), threads, answer.info);
  return answer;
}

// A small generator of our own: the same cases on every platform.
uint64_t random_below(uint64_t& state, uint64_t bound) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (state >> 33) % bound;
}

Case random_case(int64_t tokens, int64_t topk, int64_t block_size, int64_t experts, uint64_t seed) {
  Case c = {{}, tokens, topk, block_size, experts};
  for (int64_t flat = 0; flat < tokens * topk; ++flat) {
    const int64_t id = static_cast<int64_t>(random_below(seed, static_cast<uint64_t>(experts) + 1)) - 1;
    c.ids.push_back(seed % 4 == 0 ? std::min<int64_t>(id, 1 % experts) : id);  // some experts are favourites
  }
  return c;
}

void agrees(const Case& c, std::initializer_list<int> threads) {
  const Aligned want = model(c);
  for (int team : threads) {
    for (Order order : {kContiguous, kPaddedRows, kColumns}) {
      const Answer narrow = run<int32_t>(c, order, team), wide = run<int64_t>(c, order, team);
      CHECK(narrow.status == MOE_OK && narrow.out == want);
      CHECK(wide.status == MOE_OK && wide.out == want);
    }
  }
}

bool untouched(const Aligned& out) {
  const auto same = [](int32_t value) { return value == kUntouched; };
  return std::all_of(out.sorted.begin(), out.sorted.end(), same) && std::all_of(out.experts.begin(), out.experts.end(), same) &&
         out.post_pad == kUntouched;
}

// Status and first two numbers of a call that must be refused from its sizes alone.
bool refused(int64_t tokens, int64_t topk, int64_t block_size, int64_t experts, int64_t sorted_len, int64_t blocks_len, int32_t dtype, int32_t status,
             int64_t first) {
  int64_t info[4] = {};
  return moe_align_block_size(nullptr, dtype, tokens, topk, topk, 1, block_size, experts, nullptr, sorted_len, blocks_len, nullptr, nullptr, nullptr,
                              nullptr, 2, info) == status &&
         info[0] == first;
}

}  // namespace

TEST(align_worked_case) {
  const Case c = {{2, 3, 4, 1, 2, 4, 1, 3, 4, 1, 2, 3}, 4, 3, 4, 5};
  const Answer answer = run<int64_t>(c, kContiguous, 2);
  const std::vector<int32_t> sorted = {3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12};
  const std::vector<int32_t> experts = {1, 2, 3, 4};
  CHECK(answer.status == MOE_OK && answer.out.post_pad == 16);
  CHECK(answer.out.sorted.size() == 27 && std::equal(sorted.begin(), sorted.end(), answer.out.sorted.begin()));
  CHECK(answer.out.experts.size() == 7 && std::equal(experts.begin(), experts.end(), answer.out.experts.begin()));
}

TEST(align_small_grid) {
  for (int64_t tokens : {0, 1, 5, 33}) {
    for (int64_t topk : {1, 3, 8}) {
      for (int64_t block_size : {1, 2, 7, 16}) {
        for (int64_t experts : {1, 2, 8, 513}) {
          Case c = random_case(tokens, topk, block_size, experts, static_cast<uint64_t>(tokens * 1000 + topk * 100 + block_size * 10 + experts));
          agrees(c, {0, 1, 2});
          c.pad_sorted = true;
          agrees(c, {3});
        }
      }
    }
  }
}

TEST(align_teams_of_every_size) {
  const Case large = random_case(12000, 6, 16, 60, 11);
  agrees(large, {1, 2, 3, 4, 5, 6, 7, 8});
  Case one_expert = large;
  std::fill(one_expert.ids.begin(), one_expert.ids.end(), 59);
  agrees(one_expert, {1, 4, 8});
  Case none = large;
  std::fill(none.ids.begin(), none.ids.end(), -1);
  agrees(none, {1, 4, 8});
  agrees(random_case(12000, 6, 1, 60, 12), {4, 7});
  agrees(random_case(40, 2, 9000, 70, 13), {1, 5, 8});  // nearly all of it is padding
  agrees(random_case(20000, 8, 4, 20000, 14), {1, 3});    // more experts than ids in a usual part
}

TEST(align_maps_every_block) {
  std::vector<int32_t> map(64);
  for (size_t i = 0; i < map.size(); ++i) map[i] = i % 3 == 0 ? -1 : static_cast<int32_t>(i / 3);
  Case c = random_case(50, 4, 8, 64, 21);
  c.expert_map = map.data();
  agrees(c, {1, 4});
  c = random_case(9000, 4, 8, 64, 22);
  c.expert_map = map.data();
  agrees(c, {1, 4});
  map[0] = 5;  // the filler past the last block is mapped as well
  agrees(c, {1, 4});
}

TEST(align_without_experts) {
  Case c = {{-1, -1, -1}, 3, 1, 4, 0};
  const Answer answer = run<int32_t>(c, kContiguous, 2);
  CHECK(answer.status == MOE_OK && answer.out == model(c) && answer.out.post_pad == 0);
}

TEST(align_names_the_first_bad_id) {
  for (int threads = 1; threads <= 8; ++threads) {
    for (int64_t first : {int64_t{0}, int64_t{9000}, int64_t{40000}, int64_t{71999}}) {
      Case c = random_case(12000, 6, 16, 60, 31);
      for (int64_t later = first; later < 72000; later += 5000) c.ids[static_cast<size_t>(later)] = later == first ? 60 : -2;
      const Answer answer = run<int32_t>(c, kContiguous, threads);
      CHECK(answer.status == MOE_BAD_EXPERT_ID && answer.info[0] == first && answer.info[1] == 60 && answer.info[2] == 60);
      CHECK(untouched(answer.out));
    }
  }
  for (int64_t value : {INT64_MIN, int64_t{-2}, int64_t{4}, int64_t{1} << 32, INT64_MAX}) {
    const Case c = {{0, 1, 2, value, 3}, 5, 1, 2, 4};
    const Answer answer = run<int64_t>(c, kColumns, 2);
    CHECK(answer.status == MOE_BAD_EXPERT_ID && answer.info[0] == 3 && answer.info[1] == value && untouched(answer.out));
  }
}

TEST(align_refuses_what_int32_cannot_hold) {
  const int64_t largest = INT32_MAX;
  CHECK(refused(largest + 1, 1, 1, 1, largest + 1, largest + 1, MOE_I32, MOE_TOO_LARGE, largest + 1));
  CHECK(refused(1 << 20, 1 << 11, 1, 1, int64_t{1} << 31, int64_t{1} << 31, MOE_I64, MOE_TOO_LARGE, int64_t{1} << 31));
  CHECK(refused(8, 1, largest, 2, 8, 1, MOE_I32, MOE_TOO_LARGE, 8 + 2 * (largest - 1)));
  CHECK(refused(INT64_MAX, INT64_MAX, 1, 1, 8, 8, MOE_I32, MOE_TOO_LARGE, INT64_MAX));
  CHECK(refused(8, 1, INT64_MAX, INT64_MAX, 8, 1, MOE_I32, MOE_TOO_LARGE, INT64_MAX));
  CHECK(moe_align_scratch_bytes(INT64_MAX, INT64_MAX, INT64_MAX, 4) > 0 && moe_align_scratch_bytes(-5, -5, -5, -5) > 0);
}

TEST(align_refuses_bad_arguments) {
  CHECK(refused(4, 2, 4, 5, 23, 6, MOE_F32, MOE_BAD_ARGUMENT, 2));
  CHECK(refused(-1, 2, 4, 5, 23, 6, MOE_I32, MOE_BAD_ARGUMENT, 3));
  CHECK(refused(4, -2, 4, 5, 23, 6, MOE_I32, MOE_BAD_ARGUMENT, 4));
  CHECK(refused(4, 2, 0, 5, 23, 6, MOE_I32, MOE_BAD_ARGUMENT, 7));
  CHECK(refused(4, 2, 4, -5, 23, 6, MOE_I32, MOE_BAD_ARGUMENT, 8));
  CHECK(refused(4, 2, 4, 5, 22, 6, MOE_I32, MOE_BAD_ARGUMENT, 10));
  CHECK(refused(4, 2, 4, 5, 23, 5, MOE_I32, MOE_BAD_ARGUMENT, 11));
}
