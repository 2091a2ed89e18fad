#include "dispatch/traced_tensor.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string_view>

namespace py = pybind11;

namespace lazyxla::dispatch {

bool is_traced(const at::Tensor& x) {
  if (!x.key_set().has(c10::DispatchKey::Python)) return false;
  const auto sizes = x.sym_sizes();
  if (std::any_of(sizes.begin(), sizes.end(), [](const auto& n) { return n.is_symbolic(); })) {
    return false;
  }
  py::gil_scoped_acquire gil;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(x));
  const std::string_view name = Py_TYPE(object.ptr())->tp_name;
  return name == "FakeTensor" || name == "FunctionalTensor";
}

}  // namespace lazyxla::dispatch
