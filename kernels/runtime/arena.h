// Carves one scratch buffer into arrays. Without a buffer it only measures, so that one piece of code both sizes and lays out the scratch memory.
#pragma once

#include <cstdint>

namespace moe {

class Arena {
 public:
  Arena(void* base, int64_t capacity) : base_(static_cast<char*>(base)), capacity_(capacity) {}

  // Cache-line aligned, not initialised; null while measuring or when the buffer is too small.
  template <class T>
  T* take(int64_t count) {
    const int64_t at = used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return base_ && used_ <= capacity_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t capacity_;
  int64_t used_ = 0;
};

}  // namespace moe
