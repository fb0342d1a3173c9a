// Asking for the following panel while this one is multiplied, a few cache lines at a time, so that it has arrived in L2 when its turn comes. Every
// line has to be named: asking for every second one left the rest to a demand miss (bench/README.md).
//
// Several places of the panel are asked for in turn, for one core alone gets more out of memory in eight streams than in one. Where several blocks of
// rows share a panel, each asks for a part of it, with fewer lines at a time and thus fewer streams.
#pragma once

#include <immintrin.h>

#include "moe/kernel_table.h"
#include "moe/layout.h"

namespace moe {
namespace {

class Ahead {
 public:
  static constexpr int64_t kMostStreams = 8;
  // `lone_streams`: how many where one block has the whole panel for itself.
  explicit Ahead(const BlockProduct& p, int64_t lone_streams = kMostStreams) : line_(reinterpret_cast<const char*>(p.next)) {
    const int64_t lines = p.next ? ceil_div(p.next_bytes, kLine) : 0, at_once = ceil_div(lines, 4 * p.steps);
    streams_ = at_once >= kMostStreams ? lone_streams : at_once > 1 ? at_once : 1;
    run_ = ceil_div(at_once, streams_);
    left_ = ceil_div(lines, streams_);
    stride_ = left_ * kLine;
  }
  // Four times a step. Of a panel of the same size, a lone block asks for one line of eight streams.
  void quarter() { ask(run_ < left_ ? run_ : left_); }
  // Behind the last step.
  void rest() { ask(left_); }

 private:
  static constexpr int64_t kLine = 64;
  void ask(int64_t lines) {
    for (; lines > 0; --lines, --left_, line_ += kLine) {
      for (int64_t s = 0; s < streams_; ++s) _mm_prefetch(line_ + s * stride_, _MM_HINT_T1);
    }
  }
  const char* line_;
  int64_t streams_;
  int64_t run_, left_;  // lines of every stream: in a quarter of a step, and in all that is left
  int64_t stride_;  // bytes from one stream to the next
};

}  // namespace
}  // namespace moe
