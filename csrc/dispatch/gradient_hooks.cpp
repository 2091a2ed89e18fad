#include "dispatch/gradient_hooks.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "dispatch/sharded.h"
#include "dispatch/tensor.h"

namespace lazyxla::dispatch {
namespace {

PyObject* spreading = nullptr;  // never freed

struct Found {
  bool spreading = false, others = false;
};

Found hooks_of(const at::Tensor& tensor) {
  Found found;
  if (!torch::autograd::impl::get_autograd_meta(tensor)) return found;
  if (torch::autograd::impl::post_acc_grad_hooks(tensor)) found.others = true;
  if (torch::autograd::impl::hooks(tensor).empty()) return found;
  THPObjectPtr object(THPVariable_Wrap(tensor));
  PyObject* dict = reinterpret_cast<THPVariable*>(object.get())->backward_hooks;
  if (!dict || !PyDict_Check(dict)) {
    found.others = true;  // it is of C++
    return found;
  }
  PyObject *key, *function;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &function);) {
    (function == spreading ? found.spreading : found.others) = true;
  }
  return found;
}

}  // namespace

void set_spreading_hook(PyObject* function) { spreading = Py_NewRef(function); }

bool has_other_hooks(const at::Tensor& tensor) { return hooks_of(tensor).others; }

std::pair<bool, std::vector<at::Tensor>> find_unspread(const std::vector<at::Tensor>& leaves) {
  std::pair<bool, std::vector<at::Tensor>> found;
  for (const at::Tensor& leaf : leaves) {
    if (!is_lazy(*leaf.unsafeGetTensorImpl())) continue;
    const ir::Sharding* sharding = declared_sharding(leaf);
    if (!sharding) continue;
    found.first = true;
    const at::Tensor& gradient = leaf.grad();
    const bool differs = gradient.defined() && is_lazy(*gradient.unsafeGetTensorImpl()) &&
                         declared_sharding(gradient) != sharding;
    if (differs || !hooks_of(leaf).spreading) found.second.push_back(leaf);
  }
  return found;
}

}  // namespace lazyxla::dispatch
