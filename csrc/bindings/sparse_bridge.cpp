// Calls of operators on sparse tensors that lazyxla/sparse.py leaves to the host.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "dispatch/sparse.h"

namespace py = pybind11;

namespace lazyxla::bindings {

void bind_sparse(py::module_& m) {
  m.def("run_sparse_on_host", [](const std::string& name, const std::string& overload,
                                 const py::tuple& args, const py::dict& kwargs) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    // Operators that take a number for a tensor gave it to Python as that number.
    const torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
    torch::jit::Stack stack = torch::jit::createStackForSchema(
        op.schema(), torch::jit::tuple_slice(args), kwargs, std::nullopt);
    {
      py::gil_scoped_release no_gil;
      dispatch::run_sparse_on_host(op, &stack);
    }
    return torch::jit::createPyObjectForStack(std::move(stack));
  });
}

}  // namespace lazyxla::bindings
