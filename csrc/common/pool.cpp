#include "common/pool.h"

#include <array>
#include <mutex>
#include <new>
#include <utility>

#include "common/spin_lock.h"

namespace lazyxla {
namespace {

class Pool {
 public:
  // Never destroyed: storages may outlive the interpreter.
  static Pool& get() {
    static auto* instance = new Pool();
    return *instance;
  }

  void* allocate(size_t bytes) {
    const size_t which = size_class(bytes);
    if (which >= kClasses) return ::operator new(bytes);
    std::lock_guard lock(lock_);
    if (Free* free = free_[which]) {
      free_[which] = free->next;
      return free;
    }
    return carve(which * kStep);
  }

  void free(void* memory, size_t bytes) {
    const size_t which = size_class(bytes);
    if (which >= kClasses) return ::operator delete(memory);
    std::lock_guard lock(lock_);
    free_[which] = new (memory) Free{free_[which]};
  }

 private:
  static constexpr size_t kStep = 32, kClasses = 64;
  static constexpr size_t kChunk = 64 << 10;

  struct Free {
    Free* next;
  };

  static size_t size_class(size_t bytes) { return (bytes + kStep - 1) / kStep; }

  void* carve(size_t bytes) {
    if (left_ < bytes) {
      next_ = static_cast<std::byte*>(::operator new(kChunk));
      left_ = kChunk;
    }
    left_ -= bytes;
    return std::exchange(next_, next_ + bytes);
  }

  SpinLock lock_;
  std::array<Free*, kClasses> free_{};
  std::byte* next_ = nullptr;  // the rest of the newest chunk
  size_t left_ = 0;
};

}  // namespace

void* pool_allocate(size_t bytes) { return Pool::get().allocate(bytes); }
void pool_free(void* memory, size_t bytes) noexcept { Pool::get().free(memory, bytes); }

}  // namespace lazyxla
