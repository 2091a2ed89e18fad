#include "record/settings.h"

#include <ATen/record_function.h>
#include <c10/core/DefaultDtype.h>

#include <atomic>
#include <memory>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "program/graph.h"
#include "record/scope.h"

namespace lazyxla::record {
namespace {

std::atomic<uint64_t> process_options{0};

thread_local int optimizer_steps = 0;  // that the thread is in

constexpr size_t kMostTemporary = 4096;  // a program may make ever new shapes

struct Made {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  uint64_t spec_id;
};

thread_local std::vector<Made> made_in_step;
thread_local std::unordered_set<uint64_t> temporary;  // ids of specs

struct Steps : at::ObserverContext {
  explicit Steps(int count) : before(std::exchange(optimizer_steps, count)) {}
  int before;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  if (name.starts_with("Optimizer.step#")) return std::make_unique<Steps>(optimizer_steps + 1);
  if (name == "Optimizer.closure") return std::make_unique<Steps>(0);
  return nullptr;
}

// Calls of one kind may make state and others: then it is better recorded.
void note_temporary() {
  if (temporary.size() >= kMostTemporary) temporary.clear();
  for (const Made& made : made_in_step) temporary.erase(made.spec_id);
  for (const Made& made : made_in_step) {
    if (made.tensor.expired()) temporary.insert(made.spec_id);
  }
  made_in_step.clear();
}

void end(const at::RecordFunction&, at::ObserverContext* context) {
  if (!context) return;
  const int in_step = std::exchange(optimizer_steps, static_cast<Steps*>(context)->before);
  if (in_step == 1 && optimizer_steps == 0) note_temporary();
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

void watch_until_step_ends(const c10::TensorImpl& made, const ir::OpSpec& spec) {
  using Pointer = c10::intrusive_ptr<c10::TensorImpl>;
  const auto pointer = Pointer::unsafe_reclaim_from_nonowning(const_cast<c10::TensorImpl*>(&made));
  made_in_step.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(pointer), spec.id});
}

bool is_temporary(const ir::OpSpec& spec) { return temporary.contains(spec.id); }

void watch_optimizer_steps() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::USER_SCOPE}));
}

}  // namespace lazyxla::record
