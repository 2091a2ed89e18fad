#include "record/optimizer_step.h"

#include <ATen/record_function.h>

#include <memory>
#include <string_view>

namespace lazyxla::graph {
namespace {

thread_local int depth = 0;

struct Step : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  if (!std::string_view(function.name()).starts_with("Optimizer.step#")) return nullptr;
  ++depth;
  return std::make_unique<Step>();
}

void end(const at::RecordFunction&, at::ObserverContext* step) {
  if (step) --depth;
}

}  // namespace

bool in_optimizer_step() { return depth > 0; }

void watch_optimizer_steps() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::USER_SCOPE}));
}

}  // namespace lazyxla::graph
