#include "dispatch/registration.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <unordered_set>

#include "dispatch/indexing.h"
#include "dispatch/lowering_kind.h"
#include "dispatch/op_info.h"
#include "dispatch/plain_call.h"
#include "dispatch/recorder.h"
#include "dispatch/unboxed.h"

namespace lazyxla::dispatch {
namespace {

// The kernel of PyTorch's operators with a rule. Those that take index tensors have more to do
// before they can be recorded.
class RecordKernel final : public c10::OperatorKernel {
 public:
  explicit RecordKernel(OpInfo& info)
      : info_(info),
        takes_indices_(indices_argument(info) >= 0),
        fills_where_asked_(fills_where_asked(info)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (takes_indices_) {
      if (fill_by_mask(info_, stack)) return;
      expand_indices(info_, stack);
    }
    if (fills_where_asked_ && fill_once(info_, stack)) return;
    record(info_, stack);
  }

 private:
  OpInfo& info_;
  const bool takes_indices_, fills_where_asked_;
};

// The kernel of all others.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  record(OpInfo::of(op), stack);
}

torch::CppFunction kernel(OpInfo& info) {
  if (!fills_where_asked(info)) {
    if (auto unboxed = unboxed_kernel(info)) return std::move(*unboxed);
  }
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<RecordKernel>(info));
}

// Whether PyTorch decomposes the operator before a backend sees it. One with a formula for its
// gradient is decomposed only where the backend has no kernel.
bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::Autograd);
}

torch::Library& library(const std::string& ns) {
  static auto* libraries = new std::map<std::string, torch::Library>();
  return libraries
      ->try_emplace(ns, torch::Library::IMPL, ns, c10::DispatchKey::PrivateUse1, __FILE__, __LINE__)
      .first->second;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

std::vector<std::string> register_operators(const std::vector<std::string>& names) {
  std::unordered_set<std::string> wanted(names.begin(), names.end());
  std::vector<std::string> registered;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || is_composite(*op)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;  // has its own
    bool own = wanted.count(qualified_name(name)) > 0;
    if (!own && !op->schema().is_mutable()) continue;
    OpInfo& info = OpInfo::of(*op);
    if (!info.recordable || !wanted.count(info.functional_name)) continue;
    info.lowering_kind = LoweringKind::kRule;
    std::string ns = name.name.substr(0, name.name.find("::"));
    library(ns).impl(info.name.substr(ns.size() + 2).c_str(), kernel(info));
    registered.push_back(info.name);
  }
  return registered;
}

std::string functional_name(const std::string& name) {
  const auto op = find_operator(name);
  if (!op) return "";
  const OpInfo& info = OpInfo::of(*op);
  return info.recordable ? info.functional_name : "";
}

std::string kernel_origin(const std::string& name, const std::string& key) {
  const c10::DispatchKey parsed = c10::parseDispatchKey(key);
  const auto op = find_operator(name);
  if (!op || !op->hasKernelForDispatchKey(parsed)) return "";
  return op->getComputedKernelForDispatchKey(parsed).debug();
}

void rule_changed(const std::string& name, bool is_users) {
  OpInfo::forget_lowering_kind(name);
  size_t colon = name.find("::");
  auto dot = name.find('.', colon);
  bool has_overload = dot != std::string::npos;
  auto op = c10::Dispatcher::singleton().findOp(
      {name.substr(0, dot), has_overload ? name.substr(dot + 1) : ""});
  if (op && op->hasSchema()) OpInfo::of(*op).has_users_rule = is_users;
  if (op && op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) return;
  static auto* registered = new std::unordered_set<std::string>();  // the GIL guards it
  if (!registered->insert(name).second) return;
  std::string ns = name.substr(0, colon);
  library(ns).impl(name.substr(colon + 2).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace lazyxla::dispatch
