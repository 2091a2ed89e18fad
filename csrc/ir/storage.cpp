#include "ir/storage.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "common/locks.h"
#include "ir/address_allocator.h"

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
  Storage* first = nullptr;

  void add(Storage* storage) {
    storage->next_of_all_ = first;
    if (first) first->previous_of_all_ = storage;
    first = storage;
  }

  void remove(Storage* storage) {
    (storage->previous_of_all_ ? storage->previous_of_all_->next_of_all_ : first) =
        storage->next_of_all_;
    if (storage->next_of_all_) {
      storage->next_of_all_->previous_of_all_ = storage->previous_of_all_;
    }
  }

  // The storage that starts at this address; null if there is none.
  Storage* at(const void* address) const {
    Storage* s = first;
    while (s && s->data() != address) s = s->next_of_all_;
    return s;
  }
};

namespace {

constinit Guarded<AllStorages, SpinLock> all_storages;

c10::DeviceIndex current_device() {
  auto* guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
  return guard->getDevice().index();
}

// A leaf that no other storage has, on the same data. A program that reads both then takes two
// inputs, as it does once one of them was written to: the first step of a model and its copy is no
// other program than the later ones.
Value own_leaf(Value leaf) {
  if (!leaf || leaf.node->use_count() == 1) return leaf;
  return {Node::make_leaf(leaf.type(), leaf.node->leaf_data()), 0};
}

AddressAllocator* registered = nullptr;

c10::intrusive_ptr<c10::StorageImpl> make_storage(c10::StorageImpl::use_byte_size_t,
                                                  c10::SymInt size, c10::DataPtr data_ptr,
                                                  c10::Allocator*, bool) {
  // The data at an address cannot be shared with the storage that has it.
  TORCH_CHECK_NOT_IMPLEMENTED(!data_ptr,
                              "lazyxla: a slice of a storage does not exist on this device; slice "
                              "the tensor, or the storage's copy on the CPU");
  c10::DeviceIndex index = current_device();
  int64_t nbytes = size.expect_int();
  auto bytes = Geometry::contiguous(c10::ScalarType::Byte, {nbytes});
  return c10::make_intrusive<Storage>(nbytes, bytes, std::max<c10::DeviceIndex>(index, 0));
}

}  // namespace

Storage& Storage::of(c10::StorageImpl& storage) {
  if (storage.allocator() == ir::allocator()) [[likely]]
    return static_cast<Storage&>(storage);
  Storage* owner = all_storages.hold()->at(storage.data());
  TORCH_CHECK(owner, "lazyxla: ", storage.data(), " is not the address of a tensor's memory");
  return *owner;
}

SpinLock& device_mutex(c10::DeviceIndex device) {
  constinit static std::array<SpinLock, kMaxDevices> mutexes;
  return mutexes[static_cast<uint8_t>(device)];
}

void PendingSet::adopt(Storage& storage) {
  storage.unlink();
  storage.link(*this);
  ++nodes_recorded;
}

void PendingSet::adopt_all(PendingSet& other) {
  while (other.first) adopt(*other.first);
  draws.insert(draws.end(), std::make_move_iterator(other.draws.begin()),
               std::make_move_iterator(other.draws.end()));
  other.draws.clear();
  other.nodes_recorded = 0;
  has_collectives |= std::exchange(other.has_collectives, false);
  reads_data |= std::exchange(other.reads_data, false);
}

void PendingSet::note_draw(const c10::intrusive_ptr<c10::GeneratorImpl>& generator, uint64_t seed,
                           uint64_t ordinal) {
  if (!draws.empty()) {
    Draws& last = draws.back();
    if (last.generator == generator && last.seed == seed && last.next == ordinal) {
      ++last.next;
      return;
    }
  }
  draws.push_back({generator, seed, ordinal, ordinal + 1});
}

Storage::Storage(size_t nbytes, const Geometry& base, c10::DeviceIndex device)
    : c10::StorageImpl(
          use_byte_size_t(), static_cast<int64_t>(nbytes),
          c10::DataPtr(next_address(nbytes), c10::Device(c10::DeviceType::PrivateUse1, device)),
          ir::allocator(), /*resizable=*/true),
      mutex_(&device_mutex(device)),
      base_(base) {
  static std::atomic<uint64_t> next_id{1};
  id_ = next_id.fetch_add(1, std::memory_order_relaxed);
  all_storages.hold()->add(this);
}

std::unordered_map<uint64_t, Storage*> Storage::alive() {
  std::unordered_map<uint64_t, Storage*> found;
  const auto all = all_storages.hold();
  for (Storage* s = all->first; s; s = s->next_of_all_) found.emplace(s->id_, s);
  return found;
}

Storage::~Storage() {
  all_storages.hold()->remove(this);
  discard();
}

void Storage::release_resources() {
  discard();
  c10::StorageImpl::release_resources();
}

void Storage::discard() {
  Value dead;
  Content committed;
  std::lock_guard lock(mutex());
  if (pending_set_) unlink();
  std::swap(dead, value_);
  std::swap(committed, committed_);
}

void Storage::set_value(Value value, const Geometry& base, PendingSet& pending, Garbage& garbage) {
  const Value& had = pending_set_ ? committed_.value : value_;
  if (had && !committed_.base && !(base == base_)) {
    committed_.base = std::make_unique<Geometry>(base_);
  }
  base_ = base;
  set_value(std::move(value), pending, garbage);
}

void Storage::set_value(Value value, PendingSet& pending, Garbage& garbage) {
  if (!value || value.node->is_leaf()) return set_leaf(own_leaf(std::move(value)), garbage);
  forget_views(garbage);
  std::swap(value_, value);
  pending.reads_data |= value_.node->is_of_data();
  if (!pending.reads_data) value_.node->note_made_first();
  if (!pending_set_) {
    committed_.value = std::move(value);
    link(pending);
    return;
  }
  bool is_first_write = false;
  if (!committed_) {
    value.node->note_written_over();
    is_first_write = value.node->is_made_first() && !value_.node->is_made_first();
  }
  garbage.add(std::move(value));
  if (pending_set_ != &pending) {
    pending.adopt(*this);
  } else if (is_first_write) {  // in the order of storages as if it had been made in another graph
    unlink();
    link(pending);
  }
}

void Storage::set_leaf(Value leaf, Garbage& garbage) {
  forget_views(garbage);
  std::swap(value_, leaf);
  garbage.add(std::move(leaf));
  garbage.add(std::move(committed_.value));
  committed_.base.reset();
  if (pending_set_) unlink();
}

Value Storage::exchange_pending(Value leaf, Content& committed) {
  unlink();
  committed = std::move(committed_);
  std::swap(value_, leaf);
  return leaf;
}

void Storage::make_pending(Value value, Content committed, PendingSet& pending, Garbage& garbage) {
  set_leaf(std::move(value), garbage);
  committed_ = std::move(committed);
  link(pending);
}

const Value* Storage::find_view(const Geometry& geometry) const {
  if (!views_) [[likely]]
    return nullptr;
  for (const KnownView& view : *views_) {
    if (view.geometry == geometry) return &view.leaf;
  }
  return nullptr;
}

void Storage::keep_view(KnownView view) {
  if (!views_) views_ = std::make_unique<std::vector<KnownView>>();
  views_->push_back(std::move(view));
}

void Storage::forget_view(const Value& leaf, Garbage& garbage) {
  if (!views_) return;
  std::erase_if(*views_, [&](KnownView& view) {
    if (view.leaf.node.get() != leaf.node.get()) return false;
    garbage.add(std::move(view.leaf));
    return true;
  });
  if (views_->empty()) views_.reset();
}

void Storage::forget_views(Garbage& garbage) {
  if (!views_) [[likely]]
    return;
  for (KnownView& view : *views_) garbage.add(std::move(view.leaf));
  views_.reset();
}

void Storage::restore(const Value& leaf, const Geometry* base, Garbage& garbage) {
  if (base) base_ = *base;
  set_leaf(leaf, garbage);
}

void Storage::link(PendingSet& pending) {
  previous_ = pending.last;
  next_ = nullptr;
  (previous_ ? previous_->next_ : pending.first) = this;
  pending.last = this;
  pending_set_ = &pending;
}

void Storage::unlink() {
  (previous_ ? previous_->next_ : pending_set_->first) = next_;
  (next_ ? next_->previous_ : pending_set_->last) = previous_;
  previous_ = next_ = nullptr;
  pending_set_ = nullptr;
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
