#include "cpu/features.h"
#include "moe/kernel_table.h"

namespace moe {

const KernelTable* kernel_table(int isa) {
  static constexpr const KernelTable* kTables[kIsaCount] = {&amx_table, &avx512_bf16_table, &avx512_table, &avx2_table, &amx_emulated_table};
  if (isa < 0 || isa >= kIsaCount || isa_why_not(isa)) return nullptr;
  return kTables[isa];
}

}  // namespace moe
