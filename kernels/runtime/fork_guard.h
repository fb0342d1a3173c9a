// Teams in a process that came from fork() and never called exec().
#pragma once

#include "runtime/parallel.h"

namespace moe {

// True on the thread that lived through a fork: the OpenMP pool bound to it names workers that no longer exist.
bool pool_is_dead();

// Calls run(threads, body, context) on a helper thread, which has no pool yet and keeps the one it gets. False when no thread could be started.
bool run_beneath_helper(void (*run)(int, TeamBody, void*), int threads, TeamBody body, void* context);

}  // namespace moe
