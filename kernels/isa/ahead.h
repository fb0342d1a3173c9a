// Asking for the following panel while this one is multiplied, a few cache lines a step, so that it has arrived in L2 when its turn comes. Every line
// has to be named: asking for every second one left the rest to a demand miss (bench/README.md).
//
// Several places of the panel are asked for in turn, for one core alone gets more out of memory in eight streams than in one. Where several blocks of
// rows share a panel, each asks for a part of it and has fewer lines a step, thus fewer streams.
#pragma once

#include <immintrin.h>

#include "moe/kernel_table.h"
#include "moe/layout.h"

namespace moe {
namespace {

constexpr int64_t kMostStreams = 8;

class Ahead {
 public:
  // `lone_streams`: how many where one block has the whole panel for itself.
  explicit Ahead(const BlockProduct& p, int64_t lone_streams = kMostStreams) : line_(reinterpret_cast<const char*>(p.next)) {
    const int64_t lines = p.next ? ceil_div(p.next_bytes, p.steps * kLine) : 0, streams = lines >= kLinesOfStep ? lone_streams : lines / kLeastRun;
    streams_ = streams > 1 ? streams : 1;
    run_ = ceil_div(lines, streams_);
    stride_ = run_ * p.steps * kLine;
  }
  void step() {
    for (int64_t i = 0; i < run_; ++i, line_ += kLine) {
      for (int64_t s = 0; s < streams_; ++s) _mm_prefetch(line_ + s * stride_, _MM_HINT_T1);
    }
  }

 private:
  static constexpr int64_t kLine = 64, kLinesOfStep = kPanelStep * 2 / kLine, kLeastRun = kLinesOfStep / kMostStreams;
  const char* line_;
  int64_t streams_;
  int64_t run_;  // lines of every stream in a step
  int64_t stride_;  // bytes from one stream to the next
};

}  // namespace
}  // namespace moe
