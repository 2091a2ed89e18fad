// The random generator: a seed and a running ordinal.
//
// XLA programs are pure, so a random operator gets its key as an operand. `draw()` hands out
// (seed, ordinal) and counts the ordinal up: the result of an operator depends on the seed and on
// the number of random operators recorded before it, never on where the graph was cut, and a new
// seed compiles nothing. Each device has one default generator, made when it is first asked for
// and held for the life of the process.
//
// The state, as torch.Generator.get_state() gives it, is 16 bytes: seed, then ordinal, both
// little-endian. As everywhere in PyTorch, callers of the GeneratorImpl functions hold `mutex_`;
// `draw()` takes it itself.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>
#include <utility>

namespace lazyxla::dispatch {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index, uint64_t seed = c10::default_rng_seed_val);

  // The key of the next random operator: (seed, ordinal). Takes the mutex.
  std::pair<uint64_t, uint64_t> draw();

  void set_current_seed(uint64_t seed) override;  // the ordinal starts again at 0
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;  // a fresh random seed, which it returns
  void set_offset(uint64_t offset) override { ordinal_ = offset; }
  uint64_t get_offset() const override { return ordinal_; }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  static c10::DeviceType device_type();  // for at::check_generator

 private:
  Generator* clone_impl() const override;

  uint64_t seed_;
  uint64_t ordinal_ = 0;
};

// The device's default generator; a negative index means the current device. The reference is
// always valid.
const at::Generator& default_generator(c10::DeviceIndex index);

// Seeds the default generators of all devices, those not made yet included. Starts no device.
void seed_all(uint64_t seed);

}  // namespace lazyxla::dispatch
