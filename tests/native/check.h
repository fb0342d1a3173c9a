// The smallest test harness that serves: a CHECK counts and reports, a TEST registers itself.
#pragma once

#include <cstdio>

namespace check {

inline int passed = 0, failed = 0;

inline bool report(bool ok, const char* file, int line, const char* what) {
  ok ? ++passed : ++failed;
  if (!ok) std::printf("%s:%d: %s\n", file, line, what);
  return ok;
}

struct Test {
  const char* name;
  void (*body)();
  Test* next;
  static inline Test* all = nullptr;
  Test(const char* test_name, void (*test_body)()) : name(test_name), body(test_body), next(all) { all = this; }
};

}  // namespace check

#define CHECK(condition) check::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define TEST(name)                                        \
  static void test_##name();                              \
  static check::Test register_##name(#name, test_##name); \
  static void test_##name()
