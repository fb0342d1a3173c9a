#include <cstring>

#include "check.h"

// Runs all tests, or those whose name contains the first argument.
int main(int argc, char** argv) {
  for (const check::Test* test = check::Test::all; test; test = test->next) {
    if (argc > 1 && !std::strstr(test->name, argv[1])) continue;
    const int failed_before = check::failed;
    test->body();
    if (check::failed != failed_before) std::printf("in test %s\n", test->name);
  }
  std::printf("%d passed, %d failed\n", check::passed, check::failed);
  return check::failed == 0 ? 0 : 1;
}
