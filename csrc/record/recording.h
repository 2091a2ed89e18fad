// Recordings: whose work is pending.
//
// What a thread records is its own until it is run: another thread's sync neither runs it nor cuts
// it in two, so timing between threads never decides which programs there are. A thread has one
// Recording, with a pending set for each device, and autograd's threads record into that of the
// thread that they work for: PyTorch hands its thread-local state on to them, and the recording is
// part of it.
//
// Storages are shared. A thread that reads a tensor that is pending in another thread's recording
// takes the storage over, and computes it; what else the other thread has recorded remains there.
// While that other thread is within a compiled region nothing is taken, since the region is one
// program: then the reader computes the value for itself.
//
// What a thread leaves pending when it ends, and what is recorded where no thread is known as its
// author, belongs to the whole process: every flush takes it along.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/SafePyObject.h>

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "ir/storage.h"

namespace lazyxla::record {

// Derives from what PyTorch hands on to autograd's threads; it holds no Python object.
class Recording final : public c10::SafePyObject, public std::enable_shared_from_this<Recording> {
 public:
  Recording();  // for make() alone
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // The calling thread's.
  static Recording& current() {
    if (own_) [[likely]]
      return *own_;
    return find_current();
  }
  // That of the whole process.
  static Recording& shared();
  static std::vector<std::shared_ptr<Recording>> all();

  ir::PendingSet& pending(c10::DeviceIndex device) {
    auto& set = sets_[static_cast<uint8_t>(device)];
    if (ir::PendingSet* found = set.load(std::memory_order_acquire)) [[likely]]
      return *found;
    return make_set(set, device);
  }

  // The same, but null if the thread has recorded nothing for the device.
  ir::PendingSet* find(c10::DeviceIndex device) const {
    return sets_[static_cast<uint8_t>(device)].load(std::memory_order_acquire);
  }

  // Gives what is pending to the whole process.
  void hand_over();

  // Compiled regions that its thread is within.
  std::atomic<int> regions{0};

 private:
  static std::shared_ptr<Recording> make();
  static Recording& find_current();
  ir::PendingSet& make_set(std::atomic<ir::PendingSet*>& set, c10::DeviceIndex device);

  inline static thread_local Recording* own_ = nullptr;  // of a thread that is not autograd's

  std::array<std::atomic<ir::PendingSet*>, 128> sets_{};
};

// The set in which the calling thread's operators are pending.
inline ir::PendingSet& pending_set(c10::DeviceIndex device) {
  return Recording::current().pending(device);
}

// Takes over a storage that is pending elsewhere, unless a compiled region is recording it. Where
// there are collectives it takes over all that is pending there: two programs that need the same
// collective would both call it. Throws for collectives of a region.
void take_over_from(ir::PendingSet& theirs, ir::Storage& storage, ir::PendingSet& mine);

// To be called before a storage's value is used by the calling thread, whose pending set `mine` is:
// takes it over, if it is another's. Caller holds the device's mutex.
inline void take_over_pending(ir::Storage& storage, ir::PendingSet& mine) {
  ir::PendingSet* theirs = storage.pending_set();
  if (theirs && theirs != &mine) [[unlikely]]
    take_over_from(*theirs, storage, mine);
}

}  // namespace lazyxla::record
