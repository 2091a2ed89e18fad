// Plain calls: operators that the backend itself calls, on meta tensors to learn shapes or on the
// CPU's to compute, independent of the modes that the user's program is in; and tests of whether a
// call by the user is plain.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace lazyxla::dispatch {

// As long as it lives, operators ignore the modes that the user's program is in: no autograd, no
// autocast, no torch_dispatch or torch_function mode (set_default_device is one), no functorch
// level.
class PlainScope {
 public:
  PlainScope()
      : exclude_(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                 c10::autocast_dispatch_keyset |
                 c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                      c10::DispatchKey::PythonDispatcher,
                                      c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                      c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                      c10::DispatchKey::Functionalize})),
        torch_function_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~PlainScope() { at::impl::PythonTorchFunctionTLS::set_disabled_state(torch_function_); }
  PlainScope(const PlainScope&) = delete;
  PlainScope& operator=(const PlainScope&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
  at::impl::TorchFunctionDisabledState torch_function_;
};

// Whether no mode, tensor subclass or functorch transform, which know PyTorch's operators only,
// sees a call with these keys.
inline bool is_plain(c10::DispatchKeySet keys) {
  using c10::DispatchKey;
  // A transform takes its keys off the tensors before it calls what is below.
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return !keys.has(DispatchKey::Python) &&
         !included.has(DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Whether the tensor has a forward-mode derivative.
inline bool has_tangent(const at::Tensor& x) {
  return x.defined() && x._fw_grad(/*level=*/0).defined();
}

// The keys with which a kernel for the device's autograd key, called with `keys`, calls PyTorch's
// formula for the gradient. That is the kernel of all autograd keys without a registration of their
// own; of those, only the one for nested tensors has a kernel below it everywhere.
inline c10::DispatchKeySet with_formula(c10::DispatchKeySet keys) {
  return (keys & c10::after_autograd_keyset).add(c10::DispatchKey::AutogradNestedTensor);
}

// The operator of a name such as "aten::add.Tensor", if there is one.
inline std::optional<c10::OperatorHandle> find_operator(const std::string& name) {
  const auto dot = name.find('.');
  return c10::Dispatcher::singleton().findSchema(
      {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
}

// The host's kernel for an operator that lazyxla has one of its own for (host_kernels.cpp).
inline std::optional<c10::OperatorHandle> find_own_kernel(const std::string& name) {
  return find_operator("lazyxla_host::" + name.substr(name.find("::") + 2));
}

// The operator of that name without an overload.
template <typename Signature>
auto operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline bool is_tensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

// Appends the tensors that an operator returned or takes, in order, undefined ones included.
inline void flatten(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) flatten(element, tensors);
  }
}

}  // namespace lazyxla::dispatch
