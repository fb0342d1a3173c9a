// What a layer call works in, and how it is cut to fit: on sizes and numbers of threads that no machine here has.
#include "ops/layer_plan.h"

#include <algorithm>
#include <cstdint>

#include "check.h"

namespace {

using namespace moe;

struct Sizes {
  int64_t hidden, intermediate, topk, experts;
};
constexpr Sizes kPublished[] = {{2048, 768, 8, 128},  {4096, 1536, 8, 128}, {2048, 512, 10, 512}, {7168, 2048, 8, 256}, {4096, 14336, 2, 8},
                                {2880, 2880, 4, 128}, {2048, 1024, 8, 64},  {4096, 1408, 8, 128}, {5120, 8192, 1, 16}};
constexpr Sizes kOdd[] = {{192, 1, 8, 4}, {193, 33, 1, 1}, {1001, 333, 3, 7}, {16384, 1, 1, 1}, {513, 65, 32, 1000}};
constexpr int64_t kTokens[] = {0, 1, 2, 31, 33, 128, 256, 290, 512, 1000, 4096, 32768, 262144, int64_t{1} << 22};

moe_layer_args args_of(const Sizes& sizes, int64_t tokens, int isa, int threads, int32_t mode) {
  moe_layer_args args = {};
  args.tokens = tokens;
  args.topk = sizes.topk;
  args.hidden = sizes.hidden;
  args.intermediate = sizes.intermediate;
  args.experts = args.global_experts = sizes.experts;
  args.x_dtype = MOE_BF16;
  args.mode = mode;
  args.isa = isa;
  args.threads = threads;
  return args;
}

bool keeps_promise(const Sizes& sizes, int64_t tokens, int isa, int threads, int32_t mode) {
  const moe_layer_args args = args_of(sizes, tokens, isa, threads, mode);
  const Layer layer(args, *kernel_table(isa), threads);
  const int64_t rows = tokens * (mode == MOE_BATCHED ? sizes.experts : sizes.topk);
  const int64_t promised = (int64_t{64} << 20) + rows * (sizes.hidden + sizes.intermediate) * 2;
  return layer.bytes > 0 && layer.bytes <= promised && layer.bytes == moe_layer_scratch_bytes(&args);
}

}  // namespace

TEST(layer_plan_keeps_the_promise_of_memory) {
  for (int isa = 0; isa < moe_isa_count(); ++isa) {
    if (!kernel_table(isa)) continue;  // it cannot run here, and needs nothing
    for (int threads : {1, 2, 7, 16, 64, 200, 1024, 100000}) {
      for (int64_t tokens : kTokens) {
        for (int32_t mode : {MOE_REDUCED, MOE_UNREDUCED, MOE_BATCHED}) {
          for (const Sizes& sizes : kPublished) CHECK(keeps_promise(sizes, tokens, isa, threads, mode));
          for (const Sizes& sizes : kOdd) CHECK(keeps_promise(sizes, tokens, isa, threads, mode));
        }
      }
    }
  }
}

// Fewer rows a task would read panels more often: that is not done where there is memory enough.
TEST(layer_plan_cuts_no_finer_than_it_must) {
  for (int isa = 0; isa < moe_isa_count(); ++isa) {
    const KernelTable* const table = kernel_table(isa);
    if (!table) continue;
    for (const Sizes& sizes : kPublished) {
      for (int64_t tokens : kTokens) {
        for (int threads : {1, 8, 16, 64}) {
          const moe_layer_args args = args_of(sizes, tokens, isa, threads, MOE_REDUCED);
          const Layer layer(args, *table, threads);
          CHECK(layer.cut.threads == threads && layer.machine.threads == threads);
          const int64_t block = table->block_rows, most = table->f32_blocks ? kMostF32TaskRows : kMostTaskRows;
          const int64_t likes = std::min(most / block * block, round_up(std::max<int64_t>(tokens, 1), block));
          CHECK(layer.cut.rows.block == block);
          if (threads <= 16 && !table->f32_blocks) CHECK(layer.cut.rows.task == likes);
          if (threads == 1) CHECK(layer.slices.count == column_slices(layer.pairs, sizes.hidden, 1).count);
          CHECK(layer.cut.rows.task >= std::min<int64_t>(likes, 64 / block * block));
        }
      }
    }
  }
}
