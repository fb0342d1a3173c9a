#include "runtime/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace moe {
namespace {

// One per process is enough, and nothing guards it: only the thread that survived the last fork uses it, and a process has one such thread at most.
// Every other thread of a child was started there, so the runtime gives it a pool of its own.
struct Helper {
  bool started;
  sem_t begin, end;
  void (*run)(int, TeamBody, void*);
  int threads;
  TeamBody body;
  void* context;
};

Helper helper;
thread_local bool survived_fork = false;
bool forked_at_load = false;

void wait_for(sem_t* semaphore) {
  while (sem_wait(semaphore) != 0) {  // EINTR: a signal handler ran
  }
}

void* serve(void*) {
  for (;;) {
    wait_for(&helper.begin);
    helper.run(helper.threads, helper.body, helper.context);
    sem_post(&helper.end);
  }
  return nullptr;
}

// Runs in the child of every fork, so also in the child of a child, whose helper did not come along.
void on_child() {
  survived_fork = true;
  helper.started = false;
}

// Whether this process was forked before the library was loaded into it; on_child could not see that. /proc/self/stat is
// "pid (name) state ppid pgrp session tty tpgid flags ...", where the name may hold anything, so fields are counted from the last ')'.
bool forked_before_load() {
  constexpr unsigned long kForkNoExec = 0x40;  // PF_FORKNOEXEC of the kernel's sched.h
  char text[512];
  const int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return false;
  text[length] = '\0';
  const char* field = strrchr(text, ')');
  for (int skipped = 0; field && skipped < 7; ++skipped) field = strchr(field + 1, ' ');
  return field && (strtoul(field, nullptr, 10) & kForkNoExec) != 0;
}

__attribute__((constructor)) void watch_forks() {
  pthread_atfork(nullptr, nullptr, on_child);
  forked_at_load = forked_before_load();
}

bool start_helper() {
  sem_init(&helper.begin, 0, 0);
  sem_init(&helper.end, 0, 0);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  helper.started = pthread_create(&thread, &attributes, serve, nullptr) == 0;
  pthread_attr_destroy(&attributes);
  return helper.started;
}

}  // namespace

// A fork's survivor leads the child: its thread id is the process id. That costs two system calls, so it is asked only where on_child came too late.
bool pool_is_dead() { return survived_fork || (forked_at_load && syscall(SYS_gettid) == getpid()); }

bool run_beneath_helper(void (*run)(int, TeamBody, void*), int threads, TeamBody body, void* context) {
  if (!helper.started && !start_helper()) return false;
  helper.run = run;
  helper.threads = threads;
  helper.body = body;
  helper.context = context;
  sem_post(&helper.begin);
  wait_for(&helper.end);
  return true;
}

}  // namespace moe
