#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "runtime/parallel.h"

// A library that is loaded only in the child was not there to see the fork, yet the child's OpenMP pool is just as dead.
TEST(fork_before_the_library_is_loaded) {
  moe::parallel(4, [](int, int) {});
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    void* const library = dlopen(MOE_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    void* const symbol = library ? dlsym(library, "moe_parallel_team") : nullptr;
    if (!symbol) _exit(2);
    const int team = reinterpret_cast<int (*)(int)>(symbol)(3);
    _exit(team >= 1 && team <= 3 ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
