#include "steps/guards.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "common/options.h"
#include "dispatch/device_state.h"
#include "dispatch/gradient_hooks.h"
#include "dispatch/tensor.h"
#include "record/settings.h"

namespace lazyxla::steps {
namespace {

constexpr size_t kMostBytes = 256;  // of a CPU tensor

const at::Tensor* tensor_of(PyObject* object) {
  return THPVariable_Check(object) ? &THPVariable_Unpack(object) : nullptr;
}

std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}

}  // namespace

PyObject* attributes_of(PyObject* object) {
  PyObject** dict = _PyObject_GetDictPtr(object);
  return dict && *dict && PyDict_GET_SIZE(*dict) > 0 ? *dict : nullptr;
}

bool is_same(PyObject* then, PyObject* now) {
  if (then == now) return true;
  if (Py_TYPE(then) != Py_TYPE(now)) return false;
  if (PyFloat_CheckExact(then)) {  // bit by bit: 0.0 is not -0.0
    const double a = PyFloat_AS_DOUBLE(then), b = PyFloat_AS_DOUBLE(now);
    return std::memcmp(&a, &b, sizeof a) == 0;
  }
  if (PyTuple_CheckExact(then)) {
    if (PyTuple_GET_SIZE(then) != PyTuple_GET_SIZE(now)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(then); ++i) {
      if (!is_same(PyTuple_GET_ITEM(then, i), PyTuple_GET_ITEM(now, i))) return false;
    }
    return true;
  }
  if (!PyLong_CheckExact(then) && !PyUnicode_CheckExact(then) && !PyBytes_CheckExact(then) &&
      !THPDevice_Check(then)) {
    return false;
  }
  const int equal = PyObject_RichCompareBool(then, now, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

const char* unfit(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!tensor.has_storage() || tensor.layout() != c10::kStrided) return "has no memory of its own";
  if (impl.is_python_dispatch()) return "is of a subclass";
  if (tensor.grad_fn()) return "is the result of an operator with gradients";
  if (dispatch::has_other_hooks(tensor)) return "has a hook";
  if (tensor.requires_grad()) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
    if (accumulator && (!accumulator->pre_hooks().empty() || !accumulator->post_hooks().empty())) {
      return "has a hook where its gradient is accumulated";
    }
  }
  if (dispatch::is_lazy(impl)) return nullptr;
  if (!tensor.is_cpu()) return "is on another device";
  if (tensor.grad().defined()) return "is on the CPU and has a gradient";
  return tensor.nbytes() > kMostBytes ? "is on the CPU" : nullptr;
}

const char* unfit_gradient(const at::Tensor& gradient) {
  if (gradient.requires_grad()) return "is to be differentiated";
  // Not all gradients have been seen by Python.
  PyObject* object = gradient.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  if (object && reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) {
    return "is of a subclass";
  }
  if (object && attributes_of(object)) return "has attributes of its own";
  if (!dispatch::is_lazy(*gradient.unsafeGetTensorImpl())) return "is on another device";
  return unfit(gradient);
}

TensorGuard::TensorGuard(const at::Tensor& tensor)
    : dtype_(tensor.scalar_type()),
      device_(tensor.device()),
      keys_(tensor.key_set()),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      offset_(tensor.storage_offset()),
      requires_grad_(tensor.requires_grad()) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (dispatch::is_lazy(impl)) {
    storage_ = dispatch::storage_of(impl).id();
  } else {
    bytes_ = bytes_of(tensor);
  }
}

const char* TensorGuard::broken(const at::Tensor& tensor, bool which_memory) const {
  if (tensor.scalar_type() != dtype_) return "is of another dtype";
  if (tensor.device() != device_) return "is on another device";
  if (tensor.sizes() != sizes_) return "has another shape";
  if (tensor.strides() != strides_ || tensor.storage_offset() != offset_) {
    return "is laid out in another way";
  }
  if (tensor.requires_grad() != requires_grad_) return "has another requires_grad";
  if (!(tensor.key_set() == keys_)) return "is another kind of tensor";
  if (const char* why = unfit(tensor)) return why;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (dispatch::is_lazy(impl)) {
    if (which_memory && dispatch::storage_of(impl).id() != storage_) return "has other memory";
  } else if (bytes_of(tensor) != bytes_) {
    return "has other values, which Python may read";
  }
  return nullptr;
}

std::string Guards::broken() {
  for (const auto& entry : entries_) {
    std::string what = entry->broken(numbers_);
    if (!what.empty()) return entry->name + what;
  }
  return "";
}

int Guards::Entry::traverse(visitproc visit, void* arg) const {
  for (const py::object& each : held_) Py_VISIT(each.ptr());
  return 0;
}

int Guards::traverse(visitproc visit, void* arg) const {
  for (const auto& entry : entries_) {
    if (const int stop = entry->traverse(visit, arg)) return stop;
  }
  return 0;
}

Signature::Part Signature::describe(PyObject* object, int depth) {
  TORCH_CHECK_TYPE(depth < 16, "its arguments are nested too deeply");
  Part part{.kind = Part::kValue};
  const at::Tensor* tensor = THPVariable_CheckExact(object) ? tensor_of(object) : nullptr;
  if (tensor && Py_TYPE(object) != reinterpret_cast<PyTypeObject*>(ParameterClass)) {
    part.kind = Part::kTensor;
    if (const char* why = unfit(*tensor)) TORCH_CHECK_TYPE(false, "an argument ", why);
    TORCH_CHECK_TYPE(!tensor->requires_grad(), "an argument has requires_grad");
    TORCH_CHECK_TYPE(!attributes_of(object), "an argument has attributes of its own");
    part.tensor.emplace(*tensor);
  } else if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
    part.kind = PyTuple_CheckExact(object) ? Part::kTuple : Part::kList;
    for (const auto& each : py::reinterpret_borrow<py::sequence>(object)) {
      part.parts.push_back(describe(each.ptr(), depth + 1));
    }
  } else if (PyDict_CheckExact(object)) {
    part.kind = Part::kDict;
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object)) {
      part.keys.push_back(py::reinterpret_borrow<py::object>(key));
      part.parts.push_back(describe(value.ptr(), depth + 1));
    }
  } else {
    part.value = py::reinterpret_borrow<py::object>(object);
  }
  return part;
}

std::string Signature::compare(const Part& part, PyObject* now, std::vector<at::Tensor>& tensors) {
  const char* kDiffers = "an argument is another one";
  switch (part.kind) {
    case Part::kValue:
      return is_same(part.value.ptr(), now) ? "" : kDiffers;
    case Part::kTensor: {
      if (!THPVariable_CheckExact(now) || attributes_of(now)) return kDiffers;
      const at::Tensor& tensor = THPVariable_Unpack(now);
      if (tensor.grad().defined()) return "an argument has a gradient";
      if (const char* why = part.tensor->broken(tensor, /*which_memory=*/false)) {
        return c10::str("argument ", tensors.size(), " ", why);
      }
      tensors.push_back(tensor);
      return "";
    }
    case Part::kTuple:
    case Part::kList: {
      if (part.kind == Part::kTuple ? !PyTuple_CheckExact(now) : !PyList_CheckExact(now)) {
        return kDiffers;
      }
      if (PySequence_Fast_GET_SIZE(now) != static_cast<Py_ssize_t>(part.parts.size())) {
        return "there are more or fewer arguments";
      }
      for (size_t i = 0; i < part.parts.size(); ++i) {
        std::string what = compare(
            part.parts[i], PySequence_Fast_GET_ITEM(now, static_cast<Py_ssize_t>(i)), tensors);
        if (!what.empty()) return what;
      }
      return "";
    }
    case Part::kDict: {
      if (!PyDict_CheckExact(now) ||
          PyDict_GET_SIZE(now) != static_cast<Py_ssize_t>(part.parts.size())) {
        return "there are more or fewer arguments";
      }
      Py_ssize_t at = 0;
      PyObject *key, *value;
      for (size_t i = 0; PyDict_Next(now, &at, &key, &value); ++i) {
        if (!is_same(part.keys[i].ptr(), key)) return kDiffers;
        std::string what = compare(part.parts[i], value, tensors);
        if (!what.empty()) return what;
      }
      return "";
    }
  }
  return kDiffers;
}

Signature::Signature(const py::tuple& args, const py::dict& kwargs)
    : args_(describe(args.ptr(), 0)), kwargs_(describe(kwargs.ptr(), 0)) {}

std::string Signature::broken(const py::tuple& args, const py::dict& kwargs,
                              std::vector<at::Tensor>& tensors) const {
  std::string what = compare(args_, args.ptr(), tensors);
  return what.empty() ? compare(kwargs_, kwargs.ptr(), tensors) : what;
}

int Signature::traverse(const Part& part, visitproc visit, void* arg) {
  Py_VISIT(part.value.ptr());
  for (const py::object& key : part.keys) Py_VISIT(key.ptr());
  for (const Part& each : part.parts) {
    if (const int stop = traverse(each, visit, arg)) return stop;
  }
  return 0;
}

int Signature::traverse(visitproc visit, void* arg) const {
  if (const int stop = traverse(args_, visit, arg)) return stop;
  return traverse(kwargs_, visit, arg);
}

bool torch_modes_active() {
  return c10::impl::TorchDispatchModeTLS::stack_len() > 0 ||
         at::impl::PythonTorchFunctionTLS::stack_len() > 0 ||
         !at::SavedTensorDefaultHooks::get_tls_state().stack.empty() ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

std::vector<uint64_t> torch_state() {
  const at::Context& context = at::globalContext();
  const auto local = c10::impl::tls_local_dispatch_key_set();
  std::vector<uint64_t> state{
      local.included_.raw_repr(),
      local.excluded_.raw_repr(),
      at::GradMode::is_enabled(),
      c10::AutogradState::get_tls_state().get_fw_grad_mode(),
      c10::AutogradState::get_tls_state().get_multithreading_enabled(),
      record::record_settings(),
      record::current_options(),
      context.deterministicAlgorithms(),
      context.deterministicAlgorithmsWarnOnly(),
      context.deterministicFillUninitializedMemory(),
      context.userEnabledFlashSDP(),
      context.userEnabledMemEfficientSDP(),
      context.userEnabledMathSDP(),
      context.userEnabledOverrideableSDP(),
      c10::WarningUtils::get_warnAlways(),
      torch::autograd::AnomalyMode::is_enabled(),
      torch::autograd::AnomalyMode::should_check_nan(),
      torch_modes_active(),
      static_cast<uint64_t>(at::impl::PythonTorchFunctionTLS::get_disabled_state()),
      at::SavedTensorDefaultHooks::is_enabled(),
      static_cast<uint64_t>(dispatch::current_device()),
      at::autocast::is_autocast_cache_enabled(),
  };
  for (const c10::DeviceType device : {c10::kPrivateUse1, c10::kCPU}) {
    state.push_back(at::autocast::is_autocast_enabled(device));
    state.push_back(static_cast<uint64_t>(at::autocast::get_autocast_dtype(device)));
  }
  return state;
}

}  // namespace lazyxla::steps
