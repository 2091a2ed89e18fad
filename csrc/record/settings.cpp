#include "record/settings.h"

#include <c10/core/DefaultDtype.h>

#include <atomic>
#include <deque>
#include <mutex>

#include "record/scope.h"

namespace lazyxla::graph {
namespace {

// All sets of options that were ever in force, by their numbers; number 0 is the empty one.
class OptionSets {
 public:
  static OptionSets& get() {
    static auto* instance = new OptionSets();
    return *instance;
  }

  uint64_t number(const ir::CompileOptions& options) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < sets_.size(); ++i) {
      if (sets_[i] == options) return i;
    }
    sets_.push_back(options);
    return sets_.size() - 1;
  }

  const ir::CompileOptions& operator[](uint64_t number) {
    std::lock_guard lock(mutex_);
    return sets_[number];
  }

 private:
  std::mutex mutex_;
  std::deque<ir::CompileOptions> sets_{{}};  // elements never move
};

std::atomic<uint64_t> process_options{0};

uint64_t options_number() {
  const uint64_t process = process_options.load(std::memory_order_relaxed);
  const ir::CompileOptions* region = region_options();
  if (!region || region->empty()) return process;
  ir::CompileOptions options = *region;
  options.insert(OptionSets::get()[process].begin(), OptionSets::get()[process].end());
  return OptionSets::get().number(options);
}

}  // namespace

at::Float32MatmulPrecision matmul_precision() {
  using at::Float32Backend, at::Float32Precision;
  const auto of = [](Float32Backend backend) {
    return at::globalContext().float32Precision(backend, at::Float32Op::MATMUL);
  };
  switch (of(Float32Backend::CUDA)) {
    case Float32Precision::BF16:
      return at::Float32MatmulPrecision::MEDIUM;
    case Float32Precision::TF32:
      return of(Float32Backend::MKLDNN) == Float32Precision::BF16
                 ? at::Float32MatmulPrecision::MEDIUM
                 : at::Float32MatmulPrecision::HIGH;
    default:
      return at::Float32MatmulPrecision::HIGHEST;
  }
}

uint16_t record_settings() {
  static_assert(static_cast<int>(c10::ScalarType::Byte) == 0);  // which is no default dtype
  const auto precision = static_cast<unsigned>(matmul_precision());
  return static_cast<uint16_t>(precision << 8 |
                               static_cast<unsigned>(c10::get_default_dtype_as_scalartype()));
}

uint64_t current_options() { return options_number(); }

const ir::CompileOptions& options_of(uint64_t setting) { return OptionSets::get()[setting]; }

void set_process_options(ir::CompileOptions options) {
  process_options = OptionSets::get().number(options);
}

}  // namespace lazyxla::graph
