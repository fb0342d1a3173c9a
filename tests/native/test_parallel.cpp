#include "runtime/parallel.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "check.h"
#include "moe/c_api.h"

namespace {

using namespace moe;

// Every member of a team of any size has run once and knew the same team.
bool team_works(int threads) {
  std::vector<int> runs(static_cast<size_t>(threads < 1 ? 1 : threads));
  int members = 0;
  parallel(threads, [&](int rank, int team) {
    __atomic_fetch_add(&runs[static_cast<size_t>(rank)], 1, __ATOMIC_RELAXED);
    if (rank == 0) members = team;
  });
  if (members < 1 || members > static_cast<int>(runs.size())) return false;
  for (int rank = 0; rank < static_cast<int>(runs.size()); ++rank) {
    if (runs[static_cast<size_t>(rank)] != (rank < members ? 1 : 0)) return false;
  }
  return true;
}

// Whether `body` returns true in a forked child. A child that hangs is ended by its alarm and counts as false.
template <class Body>
bool in_child(const Body& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool nested_works() {
  int sum = 0;
  parallel(3, [&](int, int) { parallel(3, [&](int rank, int) { __atomic_fetch_add(&sum, rank == 0, __ATOMIC_RELAXED); }); });
  return sum >= 1 && sum <= 3;
}

bool other_thread_works() {
  bool works = false;
  pthread_t thread;
  const auto body = [](void* answer) -> void* {
    *static_cast<bool*>(answer) = team_works(3);
    return nullptr;
  };
  return pthread_create(&thread, nullptr, body, &works) == 0 && pthread_join(thread, nullptr) == 0 && works;
}

}  // namespace

TEST(share_of_covers_everything_once) {
  for (int64_t count : {0, 1, 2, 7, 64, 1000}) {
    for (int team = 1; team <= 9; ++team) {
      int64_t next = 0;
      bool good = true;
      for (int rank = 0; rank < team; ++rank) {
        const Share share = share_of(count, rank, team);
        const int64_t size = share.end - share.begin;
        good = good && share.begin == next && (size == count / team || size == count / team + 1);
        next = share.end;
      }
      CHECK(good && next == count);
    }
  }
  const int64_t huge = int64_t{1} << 40;
  CHECK(share_of(huge, 7, 8).end == huge && share_of(huge, 7, 8).begin == huge / 8 * 7);
}

TEST(teams_of_every_size) {
  for (int threads = -1; threads <= 9; ++threads) CHECK(team_works(threads));
  CHECK(moe_parallel_team(1) == 1 && moe_parallel_team(0) == 1);
  CHECK(moe_parallel_team(4) >= 1 && moe_parallel_team(4) <= 4);
  CHECK(moe_openmp_max_threads() >= 1);
}

TEST(nested_teams_end) { CHECK(nested_works()); }

TEST(barrier_separates_rounds) {
  constexpr int kRounds = 200;
  for (int threads : {1, 2, 5}) {
    Barrier barrier;
    int count = 0, wrong = 0;
    parallel(threads, [&](int, int team) {
      for (int round = 1; round <= kRounds; ++round) {
        __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
        barrier.wait(team);
        if (__atomic_load_n(&count, __ATOMIC_RELAXED) != round * team) __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
        barrier.wait(team);
      }
    });
    CHECK(wrong == 0);
  }
}

TEST(barrier_outlives_its_generation_counter) {
  Barrier barrier;
  barrier.generation = 0x7fffffff;
  int after = 0;
  parallel(2, [&](int, int team) {
    barrier.wait(team);
    __atomic_fetch_add(&after, 1, __ATOMIC_RELAXED);
  });
  CHECK(after >= 1 && barrier.generation == -0x7fffffff - 1);
}

TEST(fork_child_runs_teams) {
  CHECK(team_works(4));  // so that the parent has a pool for the child to lose
  CHECK(in_child([] { return team_works(4) && team_works(2) && team_works(8) && team_works(1) && nested_works(); }));
  CHECK(team_works(4));
}

TEST(fork_grand_child_runs_teams) {
  CHECK(team_works(4));
  CHECK(in_child([] { return team_works(4) && in_child([] { return team_works(4) && in_child([] { return team_works(3); }); }) && team_works(4); }));
  CHECK(in_child([] { return in_child([] { return team_works(4); }); }));
}

TEST(fork_child_with_threads_of_its_own) {
  CHECK(team_works(4));
  CHECK(in_child([] { return other_thread_works() && team_works(4) && other_thread_works(); }));
}

TEST(fork_from_another_thread) {
  CHECK(team_works(4));
  bool works = false;
  pthread_t thread;
  const auto body = [](void* answer) -> void* {
    *static_cast<bool*>(answer) = team_works(3) && in_child([] { return team_works(3) && in_child([] { return team_works(3); }); });
    return nullptr;
  };
  CHECK(pthread_create(&thread, nullptr, body, &works) == 0 && pthread_join(thread, nullptr) == 0 && works);
}

TEST(fork_from_within_a_team) {
  bool works = false;
  parallel(2, [&](int rank, int) {
    if (rank == 0) works = in_child([] { return team_works(3); });
  });
  CHECK(works);
}
