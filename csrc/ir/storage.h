// Storage: the memory of a tensor, as PyTorch sees it, and its lazy content.
//
// A Storage is the c10::StorageImpl of every lazyxla tensor. It owns one IR value, its current
// content, in a dense base geometry (see geometry.h); writing makes a new value; nodes that still
// read the old one keep it. All tensors that alias share the Storage and therefore see every write:
// aliasing is correct by construction.
//
// A storage without a value is uninitialised memory. A storage whose value is no leaf is *pending*:
// it is in a PendingSet, in order of becoming pending, until a flush computes it or it dies. Dead
// storages leave the set, so dead code is never lowered. What a pending storage had before, a leaf
// or nothing, is its *committed* content: a flush that fails gives it back.
//
// The data pointer is a made-up address, unique for every storage's bytes and never mapped: code
// that compares or subtracts addresses works, code that dereferences them faults at once. PyTorch
// wraps an address again here and there (torch.save does); it gets the storage that the address
// belongs to.
//
// Locking: values, bases and the pending sets of a device are guarded by its device_mutex; the list
// of all storages has a lock of its own.
#pragma once

#include <c10/core/GeneratorImpl.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "common/locks.h"
#include "common/pool.h"
#include "ir/geometry.h"
#include "ir/node.h"

namespace lazyxla::ir {

class AddressAllocator;
class Storage;

// Guards what is said above. It must not be held where the GIL may be needed.
SpinLock& device_mutex(c10::DeviceIndex device);

// A range of random numbers that pending operators draw: ordinals `first` to `next` - 1.
struct Draws {
  c10::intrusive_ptr<c10::GeneratorImpl> generator;
  uint64_t seed, first, next;
};

// Kept with a pending set by the record room: where fused mode cuts (record/batches.h).
class Batching {
 public:
  virtual ~Batching() = default;
};

// The storages of one device whose content is recorded but not computed, by one recording
// (record/recording.h).
struct PendingSet {
  PendingSet(c10::DeviceIndex device, const std::atomic<int>& regions)
      : device(device), regions(regions) {}
  ~PendingSet() { delete batching.load(); }

  const c10::DeviceIndex device;
  const std::atomic<int>& regions;  // if not zero, other threads do not take the set's storages
  Storage* first = nullptr;
  Storage* last = nullptr;
  std::vector<Draws> draws;
  bool reads_data = false;                      // some of it is computed from data
  bool has_collectives = false;                 // some of it depends on one
  uint64_t flushes = 0;                         // how often it was emptied
  std::atomic<size_t> nodes_recorded{0};        // since the last flush; bounds the graph
  std::atomic<uint64_t> newest_model_state{0};  // a storage's id; 0: none (dispatch/settling.h)
  std::atomic<int8_t> new_model_flushes{0};     // how many more may be of its initialisation
  std::vector<uint64_t> initialized_again;      // storages of it that had data, by their ids
  std::atomic<bool> fused{false};  // some of them in fused mode: they may not wait for long
  std::atomic<Batching*> batching{nullptr};  // made once

  // Moves a storage that is pending elsewhere to this set. Caller holds the device's mutex.
  void adopt(Storage& storage);
  void adopt_all(PendingSet& other);
  void note_draw(const c10::intrusive_ptr<c10::GeneratorImpl>& generator, uint64_t seed,
                 uint64_t ordinal);
};

// What a storage holds, or held: a leaf, and its geometry.
struct Content {
  Value value;
  std::unique_ptr<Geometry> base;  // null: the storage's own

  explicit operator bool() const { return static_cast<bool>(value); }
};

// A storage's content through a geometry, as data.
struct KnownView {
  Geometry geometry;
  Value leaf;
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

  // The geometry of `value`. Meaningful also without a value: what a first write would use.
  const Geometry& base() const { return base_; }
  const Value& value() const { return value_; }
  SpinLock& mutex() const { return *mutex_; }
  // The set that it is pending in, or null.
  PendingSet* pending_set() const { return pending_set_; }
  bool is_pending() const { return pending_set_ != nullptr; }
  // Whether it never had data: nothing was written to it, or all writes are pending. Caller holds
  // the mutex.
  bool is_new() const { return is_pending() ? !committed_ : !value_; }

  // How its data is spread over many devices from now on, independent of what is written to it;
  // null if it was not set. It is for the base geometry, which then stays the same. Caller holds
  // the mutex.
  const Sharding* sharding() const { return sharding_; }
  void set_sharding(const Sharding* sharding) { sharding_ = sharding; }

  // Replaces the content; caller holds the mutex. `base` must be dense with offset 0 and cover the
  // storage. `pending` is the set that the storage joins if `value` is no leaf; in place of another
  // storage's leaf it gets one of its own on the same data. The old content is moved to `garbage`.
  void set_value(Value value, PendingSet& pending, Garbage& garbage);
  void set_value(Value value, const Geometry& base, PendingSet& pending, Garbage& garbage);
  void set_leaf(Value leaf, Garbage& garbage);
  void set_base(const Geometry& base) { base_ = base; }

  // Of a pending storage: takes its value, leaving `leaf`, and what it had before.
  Value exchange_pending(Value leaf, Content& committed);
  // Undoes that: the storage is pending again with this value.
  void make_pending(Value value, Content committed, PendingSet& pending, Garbage& garbage);
  // Gives back what it had: a leaf, in this geometry, or where that is null in its own.
  void restore(const Value& leaf, const Geometry* base, Garbage& garbage);

  // Views of the present content that are data already (dispatch/region_inputs.h); null if it is
  // not known through this geometry. Another content forgets them. Caller holds the mutex.
  const Value* find_view(const Geometry& geometry) const;
  void keep_view(KnownView view);
  void forget_view(const Value& leaf, Garbage& garbage);

  Storage* next_pending() const { return next_; }

  uint64_t id() const { return id_; }  // never reused
  // All that are alive, by their ids. One may die at any time, but for those of a device whose
  // mutex the caller holds: they have lost their value before, or keep it as long.
  static std::unordered_map<uint64_t, Storage*> alive();

 private:
  friend struct PendingSet;
  void link(PendingSet& pending);
  void unlink();
  void discard();
  void forget_views(Garbage& garbage);

  SpinLock* mutex_;
  PendingSet* pending_set_ = nullptr;
  const Sharding* sharding_ = nullptr;
  Geometry base_;
  Value value_;
  Content committed_;
  std::unique_ptr<std::vector<KnownView>> views_;  // almost never any
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
