// The whole Permute-Experts-Unpermute stage, with the weighted sum: check, route, plan, then one team of threads works off the schedule.
#include <algorithm>

#include "moe/c_api.h"
#include "moe/kernel_table.h"
#include "ops/layer_args.h"
#include "ops/layer_plan.h"
#include "ops/layer_work.h"
#include "runtime/parallel.h"

int64_t moe_layer_scratch_bytes(const moe_layer_args* args) {
  const moe::KernelTable* table = moe::kernel_table(args->isa);
  return table ? moe::Layer(*args, *table, std::max(args->threads, 1)).bytes : 0;
}

int32_t moe_layer(const moe_layer_args* args, int64_t info[4]) {
  const moe::KernelTable* table = moe::kernel_table(args->isa);
  if (!table) {
    info[0] = args->isa;
    return MOE_ISA_UNAVAILABLE;
  }
  info[0] = 0;
  if (!moe::well_formed(*args)) return MOE_BAD_ARGUMENT;
  moe::Layer layer(*args, *table, std::max(args->threads, 1));
  if (layer.pairs > INT32_MAX) {
    info[0] = layer.pairs;
    info[1] = INT32_MAX;
    return MOE_TOO_LARGE;
  }
  if (layer.bytes > args->scratch_bytes) {
    info[0] = layer.bytes;
    info[1] = args->scratch_bytes;
    return MOE_SCRATCH_TOO_SMALL;
  }
  layer.lay_out(args->scratch);
  const int32_t status = moe::route(layer.routing, *args, info);
  if (status != MOE_OK) return status;
  layer.make_schedule();
  moe::parallel(layer.team_size(), [&](int rank, int) { moe::work(layer, rank); });
  return MOE_OK;
}
