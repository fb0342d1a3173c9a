// What can be said of a layer call's arguments by themselves.
#pragma once

#include <cstdint>

#include "moe/c_api.h"

namespace moe {

inline int64_t dtype_bytes(int32_t dtype) { return dtype == MOE_F32 ? 4 : 2; }

// Whatever would make the code below read or write out of bounds, or compute something else than was asked for.
inline bool well_formed(const moe_layer_args& a) {
  const bool sizes = a.tokens >= 0 && a.hidden > 0 && a.intermediate > 0 && a.experts > 0 && a.topk > 0 && a.global_experts >= 0;
  const bool modes = a.mode >= MOE_REDUCED && a.mode <= MOE_BATCHED && a.gate_layout >= MOE_CONCATENATED && a.gate_layout <= MOE_UNGATED;
  const bool activations = a.activation >= MOE_SILU && a.activation <= MOE_RELU2 && (a.activation == MOE_RELU2) == (a.gate_layout == MOE_UNGATED);
  const bool dtypes = a.x_dtype >= MOE_F32 && a.x_dtype <= MOE_F16 && a.weights_dtype >= MOE_F32 && a.weights_dtype <= MOE_F16 &&
                      (a.ids_dtype == MOE_I32 || a.ids_dtype == MOE_I64);
  const bool pointers = a.x && a.w1 && a.w2 && a.out && (a.mode == MOE_BATCHED ? a.expert_num_tokens != nullptr : a.topk_ids != nullptr);
  return sizes && modes && activations && dtypes && (pointers || a.tokens == 0) && reinterpret_cast<uintptr_t>(a.scratch) % 64 == 0;
}

}  // namespace moe
