// Ceilings of the machine for benchmarks: what the matrix unit and the memory give when nothing else stands in the way.
//
// Each probe repeats one round between two barriers until its time is up and returns the best round: a ceiling is what the machine can do, and every
// disturbance only lowers a round.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "moe/c_api.h"
#include "moe/kernel_table.h"
#include "runtime/parallel.h"

namespace moe {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// round(rank, team, size) does its part of the work and returns how much; the best total per second over all rounds of the final size. Rounds start
// at size 1 and double until one lasts `shortest` seconds, so that neither the clock nor the barriers weigh.
template <class Round>
double best_rate(int threads, double seconds, double shortest, const Round& round) {
  struct Shared {
    Barrier barrier;
    int64_t done = 0;
    int64_t size = 1;
    bool over = false;
  } shared;
  double best = 0;
  parallel(threads, [&](int rank, int team) {
    const Clock::time_point first = Clock::now();
    while (true) {
      shared.barrier.wait(team);
      if (shared.over) return;
      const Clock::time_point begin = Clock::now();
      __atomic_fetch_add(&shared.done, round(rank, team, shared.size), __ATOMIC_RELAXED);
      shared.barrier.wait(team);
      if (rank != 0) continue;
      // The others already wait at the top for this member.
      const double took = seconds_since(begin);
      if (took < shortest && shared.done > 0) {
        shared.size *= 2;
      } else {
        best = std::max(best, static_cast<double>(shared.done) / took);
        shared.over = seconds_since(first) >= seconds;
      }
      shared.done = 0;
    }
  });
  return best;
}

constexpr int64_t kCacheLine = 64;

// Whole lines only, so that members do not share one. The tail of a buffer is neither touched nor counted.
Share share_of_lines(int64_t bytes, int rank, int team) {
  const Share lines = share_of(bytes / kCacheLine, rank, team);
  return {lines.begin * kCacheLine, lines.end * kCacheLine};
}

// Memory moves whole lines, so one word of each is enough, and the fewer instructions a line takes the more lines a core waits for at once: loading
// all of every line in 16-byte pieces falls short of what wider loads reach. Four streams keep as many hardware prefetchers busy. Data that fits into
// L1 moves no lines and would look faster than it is.
void read_all(const char* data, int64_t bytes) {
  constexpr int kStreams = 4;
  const int64_t stream = bytes / kCacheLine / kStreams * kCacheLine;
  int64_t seen[kStreams] = {};
  const auto see = [&seen](int i, const char* line) {
    int64_t word;
    std::memcpy(&word, line, sizeof word);
    seen[i] ^= word;
  };
  for (int64_t at = 0; at < stream; at += kCacheLine) {
    for (int i = 0; i < kStreams; ++i) see(i, data + i * stream + at);
  }
  for (int64_t at = kStreams * stream; at < bytes; at += kCacheLine) see(0, data + at);
  // Somebody looks at the result, and the next pass may find other data: neither this pass nor the next can be dropped.
  __asm__ volatile("" : : "r"(seen[0] ^ seen[1] ^ seen[2] ^ seen[3]) : "memory");
}

// A copy whose result nobody reads could be dropped as a whole.
void copy_all(char* to, const char* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
  __asm__ volatile("" : : "r"(to) : "memory");
}

constexpr double kLongEnough = 1e-3;  // seconds; barriers cost microseconds

}  // namespace
}  // namespace moe

double moe_probe_matrix_peak(int32_t isa, int32_t threads, double seconds) {
  using namespace moe;
  const KernelTable* const table = kernel_table(isa);
  if (!table) return 0;
  return best_rate(threads, seconds, 10 * kLongEnough, [table](int, int, int64_t iterations) {
    table->enter();
    const int64_t flops = table->peak_loop(iterations);
    table->leave();
    return flops;
  });
}

double moe_probe_read_bandwidth(const void* data, int64_t bytes, int32_t threads, double seconds) {
  using namespace moe;
  if (bytes < kCacheLine) return 0;
  return best_rate(threads, seconds, kLongEnough, [=](int rank, int team, int64_t passes) {
    const Share own = share_of_lines(bytes, rank, team);
    for (int64_t pass = 0; pass < passes; ++pass) read_all(static_cast<const char*>(data) + own.begin, own.end - own.begin);
    return (own.end - own.begin) * passes;
  });
}

double moe_probe_copy_bandwidth(const void* from, void* to, int64_t bytes, int32_t threads, double seconds) {
  using namespace moe;
  if (bytes < kCacheLine) return 0;
  return best_rate(threads, seconds, kLongEnough, [=](int rank, int team, int64_t passes) {
    const Share own = share_of_lines(bytes, rank, team);
    for (int64_t pass = 0; pass < passes; ++pass) {
      copy_all(static_cast<char*>(to) + own.begin, static_cast<const char*>(from) + own.begin, own.end - own.begin);
    }
    return 2 * (own.end - own.begin) * passes;
  });
}
