#include "dispatch/generator.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/TensorImpl.h>

#include <array>
#include <cstring>
#include <optional>

#include "common/locks.h"
#include "dispatch/device_state.h"

namespace lazyxla::dispatch {
namespace {

constexpr size_t kStateBytes = 2 * sizeof(uint64_t);

// The default generators of all devices. Never destroyed: Python may hold them until the end.
struct Defaults {
  std::array<at::Generator, 128> generators;
  std::optional<uint64_t> seed;  // of the last seed_all, for generators made later
};

auto& defaults = *new Guarded<Defaults>();

}  // namespace

Generator::Generator(c10::DeviceIndex index, uint64_t seed)
    : c10::GeneratorImpl(c10::Device(kDeviceType, index),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      seed_(seed) {}

c10::DeviceType Generator::device_type() { return kDeviceType; }

std::pair<uint64_t, uint64_t> Generator::draw() {
  std::lock_guard lock(mutex_);
  return {seed_, ordinal_++};
}

void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  ordinal_ = 0;
}

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void Generator::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  TORCH_CHECK_VALUE(state.numel() == kStateBytes, "lazyxla: a generator state has ", kStateBytes,
                    " bytes (seed and ordinal), got ", state.numel());
  const auto* bytes = static_cast<const uint8_t*>(state.data());
  std::memcpy(&seed_, bytes, sizeof(seed_));
  std::memcpy(&ordinal_, bytes + sizeof(seed_), sizeof(ordinal_));
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  const at::TensorBase state = at::detail::empty_cpu({kStateBytes}, at::kByte);
  auto* bytes = static_cast<uint8_t*>(state.mutable_data_ptr());
  std::memcpy(bytes, &seed_, sizeof(seed_));
  std::memcpy(bytes + sizeof(seed_), &ordinal_, sizeof(ordinal_));
  return state.getIntrusivePtr();
}

Generator* Generator::clone_impl() const {
  auto* copy = new Generator(device().index(), seed_);
  copy->ordinal_ = ordinal_;
  return copy;
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  index = resolve_index(index);
  const auto all = defaults.hold();
  auto& generator = all->generators[index];
  if (!generator.defined()) {
    generator = at::make_generator<Generator>(
        index, all->seed ? *all->seed : c10::detail::getNonDeterministicRandom());
  }
  return generator;
}

void seed_all(uint64_t seed) {
  std::array<at::Generator, 128> generators;
  {
    const auto all = defaults.hold();
    all->seed = seed;
    generators = all->generators;
  }
  for (auto& generator : generators) {
    if (generator.defined()) {
      std::lock_guard lock(generator.mutex());
      generator.set_current_seed(seed);
    }
  }
}

}  // namespace lazyxla::dispatch
