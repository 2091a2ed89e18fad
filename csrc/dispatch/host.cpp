#include "dispatch/host.h"

#include <ATen/core/enum_tag.h>
#include <ATen/native/CPUFallback.h>

#include "dispatch/device_state.h"
#include "graph/counters.h"
#include "graph/scope.h"
#include "options.h"

namespace lazyxla::dispatch {
namespace {

// The host kernel cannot draw from our generator; it gets one of its own, seeded from it.
void replace_generators(const OpInfo& info, torch::jit::Stack* stack) {
  size_t first = stack->size() - info.args.size();
  for (size_t i = 0; i < info.args.size(); ++i) {
    if (info.args[i].kind == ArgKind::kGenerator) (*stack)[first + i] = c10::IValue();
  }
}

// Whether the shape of the result depends on the data, as that of nonzero.
bool is_data_dependent(const c10::OperatorHandle& op) {
  for (at::Tag tag : op.getTags()) {
    if (tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output) return true;
  }
  return false;
}

std::string describe_arguments(const OpInfo& info, const torch::jit::Stack& stack) {
  std::ostringstream text;
  const char* separator = "";
  for (const c10::IValue& value : torch::jit::last(stack, info.args.size())) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    text << separator << value.toTensor().scalar_type() << value.toTensor().sizes();
    separator = ", ";
  }
  return text.str();
}

}  // namespace

void run_on_host(const OpInfo& info, torch::jit::Stack* stack) {
  graph::check_unbroken(info.name + " runs on the host");
  if (is_data_dependent(info.handle)) {  // no lowering can exist: this is how such operators run
    ++graph::Counters::get().data_dependent;
    at::native::cpu_fallback(info.handle, stack);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!options().strict_fallback, "lazyxla: ", info.name, "(",
                              describe_arguments(info, *stack),
                              ") has no lowering and would run on the host; strict mode "
                              "(LAZYXLA_STRICT) makes this an error");
  if (!info.warned.exchange(true)) {
    TORCH_WARN("lazyxla: ", info.name,
               " has no lowering and runs on the host: everything recorded is run first, and the "
               "data is copied there and back. Further calls are only counted "
               "(lazyxla.fallbacks()); LAZYXLA_STRICT=1 makes them errors.");
  }
  graph::Counters::get().count_fallback(info.name);
  replace_generators(info, stack);
  at::native::cpu_fallback(info.handle, stack);
}

}  // namespace lazyxla::dispatch
