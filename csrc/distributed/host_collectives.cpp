#include "distributed/host_collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "distributed/collectives.h"

namespace lazyxla::distributed {
namespace {

// Reached by every call, on any device, and in inference mode, too.
constexpr c10::DispatchKey kKey = c10::DispatchKey::BackendSelect;

void run_recorded_first(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  if (!keys.has(c10::DispatchKey::PrivateUse1)) run_recorded_collectives();
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

}  // namespace

void run_recorded_before_host_collectives() {
  static const torch::Library* const library = [] {
    auto* hooks = new torch::Library(torch::Library::IMPL, "c10d", kKey, __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.getNamespace() != "c10d") continue;
      hooks->impl(toString(name).c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&run_recorded_first>());
    }
    return hooks;
  }();
  (void)library;
}

}  // namespace lazyxla::distributed
