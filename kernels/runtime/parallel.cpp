#include "runtime/parallel.h"

#include <emmintrin.h>
#include <sched.h>

#include "runtime/fork_guard.h"

// libgomp's own functions, by name: what GCC makes of `#pragma omp parallel num_threads(threads)`. Clang would make calls of another runtime of it,
// whose pool of threads would compete with torch's.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
int omp_get_max_threads();
}

namespace moe {
namespace {

struct Region {
  TeamBody body;
  void* context;
};

void run_member(void* data) {
  const Region& region = *static_cast<Region*>(data);
  region.body(region.context, omp_get_thread_num(), omp_get_num_threads());
}

// A call from within a parallel region gets the team that OpenMP's nesting rules allow, by default one member.
void run_here(int threads, TeamBody body, void* context) {
  Region region = {body, context};
  GOMP_parallel(run_member, &region, static_cast<unsigned>(threads), 0);
}

}  // namespace

void run_team(int threads, TeamBody body, void* context) {
  if (threads <= 1) return body(context, 0, 1);
  if (!pool_is_dead()) return run_here(threads, body, context);
  // Without a helper there are no threads to be had: the caller is the whole team.
  if (!run_beneath_helper(run_here, threads, body, context)) body(context, 0, 1);
}

void Barrier::wait(int team) {
  const int mine = __atomic_load_n(&generation, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == team) {
    __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);  // before the release below: nobody arrives again until he has seen it
    __atomic_add_fetch(&generation, 1, __ATOMIC_RELEASE);
    return;
  }
  for (int turn = 0; __atomic_load_n(&generation, __ATOMIC_ACQUIRE) == mine; turn += turn < kSpinTurns) spin_pause(turn);
}

void spin_pause(int turn) {
  if (turn < kSpinTurns) {
    _mm_pause();
  } else {
    sched_yield();
  }
}

int max_threads() { return omp_get_max_threads(); }

}  // namespace moe
