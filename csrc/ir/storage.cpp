#include "ir/storage.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "ir/address_allocator.h"
#include "ir/spin_lock.h"

namespace lazyxla::ir {
namespace {

constexpr size_t kMaxDevices = 256;  // c10::DeviceIndex is one signed byte

// Addresses above 2^60 are not canonical on any 64-bit machine, so dereferencing one faults.
void* next_address(size_t nbytes) {
  static std::atomic<uint64_t> next{uint64_t{1} << 60};
  uint64_t span = (nbytes + 511) & ~uint64_t{255};
  return reinterpret_cast<void*>(next.fetch_add(span, std::memory_order_relaxed));
}

}  // namespace

// Every storage that is alive. Only walked to find the owner of an address, which is rare; a list
// keeps the cost of making a storage low.
struct AllStorages {
  SpinLock mutex;
  Storage* first = nullptr;

  static AllStorages& get() {
    static auto* instance = new AllStorages();
    return *instance;
  }

  void add(Storage* storage) {
    std::lock_guard lock(mutex);
    storage->next_of_all_ = first;
    if (first) first->previous_of_all_ = storage;
    first = storage;
  }

  void remove(Storage* storage) {
    std::lock_guard lock(mutex);
    (storage->previous_of_all_ ? storage->previous_of_all_->next_of_all_ : first) =
        storage->next_of_all_;
    if (storage->next_of_all_) {
      storage->next_of_all_->previous_of_all_ = storage->previous_of_all_;
    }
  }

  // The storage that starts at this address; null if there is none.
  Storage* at(const void* address) {
    std::lock_guard lock(mutex);
    Storage* s = first;
    while (s && s->data() != address) s = s->next_of_all_;
    return s;
  }
};

namespace {

c10::DeviceIndex current_device() {
  auto* guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
  return guard->getDevice().index();
}

AddressAllocator* registered = nullptr;

c10::intrusive_ptr<c10::StorageImpl> make_storage(c10::StorageImpl::use_byte_size_t,
                                                  c10::SymInt size, c10::DataPtr data_ptr,
                                                  c10::Allocator*, bool) {
  c10::DeviceIndex index = data_ptr ? data_ptr.device().index() : current_device();
  int64_t nbytes = size.expect_int();
  auto bytes = Geometry::contiguous(c10::ScalarType::Byte, {nbytes});
  return c10::make_intrusive<Storage>(nbytes, bytes, std::max<c10::DeviceIndex>(index, 0));
}

}  // namespace

Storage& Storage::of(c10::StorageImpl& storage) {
  if (storage.allocator() == ir::allocator()) [[likely]]
    return static_cast<Storage&>(storage);
  Storage* owner = AllStorages::get().at(storage.data());
  TORCH_CHECK(owner, "lazyxla: ", storage.data(), " is not the address of a tensor's memory");
  return *owner;
}

PendingSet& PendingSet::of(c10::DeviceIndex device) {
  // Never destroyed: storages may outlive the interpreter.
  static auto* sets = new std::array<PendingSet, kMaxDevices>();
  return (*sets)[static_cast<uint8_t>(device)];
}

Storage::Storage(size_t nbytes, const Geometry& base, c10::DeviceIndex device)
    : c10::StorageImpl(
          use_byte_size_t(), static_cast<int64_t>(nbytes),
          c10::DataPtr(next_address(nbytes), c10::Device(c10::DeviceType::PrivateUse1, device)),
          ir::allocator(), /*resizable=*/true),
      pending_set_(&PendingSet::of(device)),
      base_(base) {
  static std::atomic<uint64_t> next_id{1};
  id_ = next_id.fetch_add(1, std::memory_order_relaxed);
  AllStorages::get().add(this);
}

Storage* Storage::find(const Storage* address, uint64_t id) {
  auto& all = AllStorages::get();
  std::lock_guard lock(all.mutex);
  Storage* s = all.first;
  while (s && !(s == address && s->id_ == id)) s = s->next_of_all_;
  return s;
}

Storage::~Storage() {
  AllStorages::get().remove(this);
  discard();
}

void Storage::release_resources() {
  discard();
  c10::StorageImpl::release_resources();
}

void Storage::discard() {
  Value dead;
  std::lock_guard lock(pending_set_->mutex);
  if (pending_) unlink();
  std::swap(dead, value_);
}

Value Storage::set_value(Value value, const Geometry& base) {
  base_ = base;
  return set_value(std::move(value));
}

Value Storage::set_value(Value value) {
  bool pending = value && !value.node->is_leaf();
  if (value && !pending) value.node->home = id_;
  if (pending && !pending_) link();
  if (!pending && pending_) unlink();
  std::swap(value_, value);
  return value;
}

void Storage::link() {
  previous_ = pending_set_->last;
  next_ = nullptr;
  (previous_ ? previous_->next_ : pending_set_->first) = this;
  pending_set_->last = this;
  pending_ = true;
}

void Storage::unlink() {
  (previous_ ? previous_->next_ : pending_set_->first) = next_;
  (next_ ? next_->previous_ : pending_set_->last) = previous_;
  previous_ = next_ = nullptr;
  pending_ = false;
}

c10::DataPtr AddressAllocator::allocate(size_t nbytes) {
  return {next_address(nbytes), c10::Device(c10::DeviceType::PrivateUse1, current_device())};
}

void AddressAllocator::copy_data(void*, const void*, std::size_t) const {
  TORCH_CHECK(false, "lazyxla: memory of the device cannot be copied by address");
}

c10::Allocator* allocator() { return registered; }

void register_storage(AddressAllocator& allocator) {
  registered = &allocator;
  c10::SetAllocator(c10::DeviceType::PrivateUse1, registered);
  c10::SetStorageImplCreate(c10::DeviceType::PrivateUse1, &make_storage);
}

}  // namespace lazyxla::ir
