// Asking for the following panel while this one is multiplied, a few cache lines a step, so that it has arrived in L2 when its turn comes. Every line
// has to be named: asking for every second one left the rest to a demand miss (bench/README.md).
#pragma once

#include <immintrin.h>

#include "moe/kernel_table.h"
#include "moe/layout.h"

namespace moe {
namespace {

class Ahead {
 public:
  explicit Ahead(const BlockProduct& p)
      : line_(reinterpret_cast<const char*>(p.next)), lines_per_step_(p.next ? ceil_div(p.next_bytes, p.steps * kLine) : 0) {}
  void step() {
    for (int64_t i = 0; i < lines_per_step_; ++i, line_ += kLine) _mm_prefetch(line_, _MM_HINT_T1);
  }

 private:
  static constexpr int64_t kLine = 64;
  const char* line_;
  int64_t lines_per_step_;
};

}  // namespace
}  // namespace moe
