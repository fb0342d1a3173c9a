// Exported functions that only ask; every operation exports its own from ops/.
#include "moe/c_api.h"

#include "cpu/features.h"
#include "runtime/parallel.h"

int32_t moe_abi_version(void) { return MOE_ABI_VERSION; }

int32_t moe_isa_count(void) { return moe::kIsaCount; }

const char* moe_isa_name(int32_t isa) { return moe::isa_name(isa); }

const char* moe_isa_why_not(int32_t isa) { return moe::isa_name(isa) ? moe::isa_why_not(isa) : "there is no instruction set of that number"; }

int32_t moe_isa_in_order(int32_t place) { return moe::isa_in_order(place); }

const char* moe_cpu_features(void) { return moe::cpu_features(); }

int64_t moe_cache_bytes(int32_t level) { return moe::cache_bytes(level); }

int32_t moe_openmp_max_threads(void) { return moe::max_threads(); }

int32_t moe_parallel_team(int32_t threads) {
  int32_t members = 0;
  moe::parallel(threads, [&](int rank, int team) {
    if (rank == 0) members = team;
  });
  return members;
}
