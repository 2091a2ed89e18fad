// Storage: the memory a tensor lies on, as PyTorch sees it, and its lazy content.
//
// A Storage is the c10::StorageImpl of every lazyxla tensor. It owns one IR value, its current
// content, in a dense base geometry (see geometry.h); writing makes a new value and leaves the old
// one to whoever still reads it. All tensors that alias share the Storage and therefore see every
// write: aliasing is correct by construction.
//
// A storage without a value is uninitialised memory. A storage whose value is no leaf is *pending*:
// it stands in its device's PendingSet, in order of becoming pending, until a flush computes it or
// it dies. Dead storages leave the set, so dead code is never lowered.
//
// The data pointer is a made-up address, unique for every storage's bytes and never mapped: code
// that compares or subtracts addresses works, code that dereferences them faults at once. PyTorch
// wraps an address again here and there (torch.save does); it gets the storage that the address
// belongs to.
//
// Locking: value, base and the pending links are guarded by PendingSet::mutex of the storage's
// device; the list of all storages has a lock of its own.
#pragma once

#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "ir/geometry.h"
#include "ir/node.h"
#include "ir/pool.h"
#include "ir/spin_lock.h"

namespace lazyxla::ir {

class AddressAllocator;
class Storage;

// The storages of one device whose content is recorded but not computed, and the device's lock.
// Whoever may need the GIL must not hold the mutex.
struct PendingSet {
  SpinLock mutex;
  Storage* first = nullptr;
  Storage* last = nullptr;
  std::atomic<size_t> nodes_recorded{0};  // since the last flush; bounds the graph
  std::atomic<bool> fused{false};         // some of them in fused mode: they may not wait for long

  static PendingSet& of(c10::DeviceIndex device);
};

class Storage final : public c10::StorageImpl {
 public:
  // `base` is dense and covers the storage.
  Storage(size_t nbytes, const Geometry& base, c10::DeviceIndex device);
  ~Storage() override;
  static void* operator new(size_t bytes) { return pool_allocate(bytes); }
  static void operator delete(void* memory) { pool_free(memory, sizeof(Storage)); }
  void release_resources() override;

  // The Storage behind what PyTorch holds: itself, or the owner of a wrapped address.
  static Storage& of(c10::StorageImpl& storage);

  // The geometry `value` lies in. Meaningful also without a value: what a first write would use.
  const Geometry& base() const { return base_; }
  const Value& value() const { return value_; }
  PendingSet& pending_set() const { return *pending_set_; }
  bool is_pending() const { return pending_; }

  // Replaces the content. `base` must be dense with offset 0 and cover the storage. Caller holds
  // the mutex and must drop the returned old value after releasing it (its graph may be large).
  Value set_value(Value value, const Geometry& base);
  Value set_value(Value value);
  void set_base(const Geometry& base) { base_ = base; }

  Storage* next_pending() const { return next_; }

  uint64_t id() const { return id_; }  // never given twice
  // The storage that had this id at this address, if it is still alive.
  static Storage* find(const Storage* address, uint64_t id);

 private:
  void link();
  void unlink();
  void discard();

  PendingSet* pending_set_;
  Geometry base_;
  Value value_;
  bool pending_ = false;
  Storage* previous_ = nullptr;
  Storage* next_ = nullptr;

  friend struct AllStorages;
  uint64_t id_;
  Storage* previous_of_all_ = nullptr;
  Storage* next_of_all_ = nullptr;
};

// The allocator that every Storage has.
c10::Allocator* allocator();

// Makes PyTorch create a Storage for every storage on the lazyxla device. Called once at start-up;
// the allocator is never freed.
void register_storage(AddressAllocator& allocator);

}  // namespace lazyxla::ir
