// The only place that knows OpenMP: a team of threads runs one function, and every member learns its rank.
//
// The team comes from the OpenMP runtime that torch already loaded, so torch.set_num_threads governs it (callers pass its value) and no second
// pool of threads competes for the cores.
//
// After fork() only the calling thread lives on; the OpenMP runtime still believes in its old workers and would wait for them for ever. A child
// therefore runs its teams under a fresh thread, for which the runtime builds a fresh pool (fork_guard.cpp).
#pragma once

#include <cstdint>

namespace moe {

// body(context, rank, team): called once on every member of a team of at most `threads` members; returns when all are done.
using TeamBody = void (*)(void* context, int rank, int team);
void run_team(int threads, TeamBody body, void* context);

template <class F>
void parallel(int threads, F&& body) {
  run_team(threads, [](void* context, int rank, int team) { (*static_cast<F*>(context))(rank, team); }, &body);
}

// The half-open share [begin, end) of `count` items that `rank` of `team` takes; shares differ by at most one item.
struct Share {
  int64_t begin, end;
};
inline Share share_of(int64_t count, int rank, int team) {
  const int64_t base = count / team, rest = count % team;
  const int64_t begin = rank * base + (rank < rest ? rank : rest);
  return {begin, begin + base + (rank < rest ? 1 : 0)};
}

// A sense-reversing barrier for use inside a team body; the object is shared by the team and starts zeroed. Those who wait watch another cache line
// than the one that those who arrive fight for.
struct Barrier {
  alignas(64) int arrived = 0;
  alignas(64) int generation = 0;
  void wait(int team);
};

// Tells the core that this thread spins; after many turns gives the processor away (teams may be larger than the machine).
// Turns past kSpinTurns are all alike.
constexpr int kSpinTurns = 256;
void spin_pause(int turn);

int max_threads();

}  // namespace moe
