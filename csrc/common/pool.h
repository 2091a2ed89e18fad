// Memory for what recording makes: nodes, storages, buffers.
//
// They have a few sizes and are freed in large numbers, which general allocators serve slowly; here
// freed blocks are kept in lists, by size, for reuse. And they are close together, which matters
// when a large program has left none of them in the processor's caches.
#pragma once

#include <cstddef>

namespace lazyxla {

void* pool_allocate(size_t bytes);
void pool_free(void* memory, size_t bytes) noexcept;

// For std::allocate_shared.
template <typename T>
struct PoolAllocator {
  using value_type = T;

  PoolAllocator() = default;
  template <typename U>
  PoolAllocator(const PoolAllocator<U>&) {}

  T* allocate(size_t n) {
    static_assert(alignof(T) <= alignof(std::max_align_t));
    return static_cast<T*>(pool_allocate(n * sizeof(T)));
  }
  void deallocate(T* memory, size_t n) noexcept { pool_free(memory, n * sizeof(T)); }

  template <typename U>
  bool operator==(const PoolAllocator<U>&) const {
    return true;
  }
};

}  // namespace lazyxla
