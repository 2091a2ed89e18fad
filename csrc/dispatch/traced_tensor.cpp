#include "dispatch/traced_tensor.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace py = pybind11;

namespace lazyxla::dispatch {
namespace {

thread_local bool traces_for_lazyxla = false;

}  // namespace

bool trace_for_lazyxla(bool on) { return std::exchange(traces_for_lazyxla, on); }

bool is_traced(const at::Tensor& x) {
  if (!traces_for_lazyxla || !x.key_set().has(c10::DispatchKey::Python)) return false;
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
