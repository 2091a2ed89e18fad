#include "record/settings.h"

#include <ATen/record_function.h>
#include <c10/core/DefaultDtype.h>

#include <atomic>
#include <memory>
#include <string_view>

#include "program/graph.h"
#include "record/scope.h"

namespace lazyxla::record {
namespace {

std::atomic<uint64_t> process_options{0};

thread_local int optimizer_steps = 0;  // that the thread is in

struct Step : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  if (!std::string_view(function.name()).starts_with("Optimizer.step#")) return nullptr;
  ++optimizer_steps;
  return std::make_unique<Step>();
}

void end(const at::RecordFunction&, at::ObserverContext* step) {
  if (step) --optimizer_steps;
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

uint64_t current_options() {
  const uint64_t process = process_options.load(std::memory_order_relaxed);
  const CompileOptions* region = region_options();
  if (!region || region->empty()) return process;
  CompileOptions options = *region;
  const CompileOptions& others = program::options_of(process);
  options.insert(others.begin(), others.end());
  return program::number_options(options);
}

void set_process_options(CompileOptions options) {
  process_options = program::number_options(options);
}

bool in_optimizer_step() { return optimizer_steps > 0; }

void watch_optimizer_steps() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::USER_SCOPE}));
}

}  // namespace lazyxla::record
