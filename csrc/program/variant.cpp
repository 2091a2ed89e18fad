#include "program/variant.h"

#include <algorithm>
#include <optional>

#include "common/gil.h"
#include "common/waiting.h"
#include "pjrt/client.h"
#include "pjrt/error.h"
#include "pjrt/runtime.h"
#include "program/workers.h"

namespace lazyxla::program {
namespace {

constexpr int64_t kOperatorsOfOne = 100;

std::atomic<int64_t> alive{0};

}  // namespace

int64_t size_of_variants() { return alive; }

Variant::Variant() {
  alive += size_;
  note_run();  // it is about to
}

Variant::~Variant() { alive -= size_; }

void Variant::note_operators(int64_t operators) {
  const int64_t more = 1 + operators / kOperatorsOfOne - size_;
  size_ += more;
  alive += more;
}

void Variant::note_run() const {
  static std::atomic<int64_t> runs{0};
  last_run_.store(++runs, std::memory_order_relaxed);
}

bool Variant::matches(c10::ArrayRef<ir::ScalarValue> slots) const {
  return state_.load(std::memory_order_relaxed) != kFailed && !has_other_numbers_ &&
         scalars.serves(slots);
}

void Variant::compile(const std::string& artifact, const CompileOptions& options,
                      const Keep& keep) {
  try {
    take(pjrt::Runtime::get().client().compile(artifact, "mlir", options));
  } catch (...) {
    error_ = std::current_exception();
  }
  // From here on the program may run, and the process end: that waits until the program is kept.
  std::optional<NeedsInterpreter> needs_interpreter;
  try {
    if (keep && !error_) needs_interpreter.emplace();
  } catch (const InterpreterEnds&) {
  }
  state_.store(error_ ? kFailed : kCompiled, std::memory_order_release);
  waiting::announce();
  if (!needs_interpreter) return;
  try {
    keep(executable_->program().serialize());
  } catch (const pjrt::Error&) {  // not every plugin can; the next process compiles again
  }
}

void Variant::load(const std::string& serialized) {
  take(pjrt::Runtime::get().client().deserialize(serialized));
  state_.store(kCompiled, std::memory_order_release);
}

void Variant::take(std::unique_ptr<pjrt::Executable> executable) {
  executable_ = std::move(executable);
  if (partition) results_ = partition->results_of(executable_->program());
  auto memory = executable_->program().memory_stats();
  bytes_needed_ = memory["temporary"] + memory["outputs"];
}

void Variant::take(HostProgram program, size_t slots) {
  host_program_ = std::move(program);
  scalars.variable.assign(slots, true);
  state_.store(kCompiled, std::memory_order_release);
}

bool Variant::runs_on_host() const {
  return host_program_ || std::any_of(stages.begin(), stages.end(), [](const StageProgram& stage) {
           return stage.variant->runs_on_host();
         });
}

void Variant::take(std::vector<StageProgram> compiled, size_t values_handed_on) {
  stages = std::move(compiled);
  handed_on = values_handed_on;
  state_.store(kCompiled, std::memory_order_release);
}

void Variant::await_compiled() const {
  if (state_.load(std::memory_order_acquire) != kCompiling) return;
  WithoutGil no_gil;
  waiting::wait([this] { return state_.load(std::memory_order_acquire) != kCompiling; });
}

void Variant::check_compiled() const {
  await_compiled();
  if (error_) std::rethrow_exception(error_);
}

const pjrt::Executable& Variant::executable() const {
  check_compiled();
  return *executable_;
}

}  // namespace lazyxla::program
