// What a thread does for a layer.
#pragma once

#include "ops/layer_plan.h"

namespace moe {

// Works off the layer's schedule until no task is left. Every member of the team calls it once.
void work(const Layer& layer, int rank);

}  // namespace moe
