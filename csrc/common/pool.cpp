#include "common/pool.h"

#include <array>
#include <new>
#include <utility>

#include "common/locks.h"

namespace lazyxla {
namespace {

constexpr size_t kStep = 32, kClasses = 64;
constexpr size_t kChunk = 64 << 10;

size_t size_class(size_t bytes) { return (bytes + kStep - 1) / kStep; }

class Pool {
 public:
  void* allocate(size_t which) {
    if (Free* free = free_[which]) {
      free_[which] = free->next;
      return free;
    }
    return carve(which * kStep);
  }

  void free(void* memory, size_t which) { free_[which] = new (memory) Free{free_[which]}; }

 private:
  struct Free {
    Free* next;
  };

  void* carve(size_t bytes) {
    if (left_ < bytes) {
      next_ = static_cast<std::byte*>(::operator new(kChunk));
      left_ = kChunk;
    }
    left_ -= bytes;
    return std::exchange(next_, next_ + bytes);
  }

  std::array<Free*, kClasses> free_{};
  std::byte* next_ = nullptr;  // the rest of the newest chunk
  size_t left_ = 0;
};

constinit Guarded<Pool, SpinLock> pool;

}  // namespace

void* pool_allocate(size_t bytes) {
  const size_t which = size_class(bytes);
  return which < kClasses ? pool.hold()->allocate(which) : ::operator new(bytes);
}

void pool_free(void* memory, size_t bytes) noexcept {
  const size_t which = size_class(bytes);
  if (which >= kClasses) return ::operator delete(memory);
  pool.hold()->free(memory, which);
}

}  // namespace lazyxla
