#include "dispatch/python_error.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

namespace py = pybind11;

namespace lazyxla::dispatch {

bool is_interruption(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const python_error*>(&error);
  const auto* of_pybind = dynamic_cast<const py::error_already_set*>(&error);
  if (!of_torch && !of_pybind) return false;
  py::gil_scoped_acquire gil;
  // PyTorch throws some of its exceptions while Python's error indicator still holds their type.
  PyObject* type = of_pybind        ? of_pybind->type().ptr()
                   : of_torch->type ? of_torch->type
                                    : PyErr_Occurred();
  if (!type) return false;
  return !PyErr_GivenExceptionMatches(type, PyExc_Exception) ||
         PyErr_GivenExceptionMatches(type, PyExc_MemoryError) ||
         PyErr_GivenExceptionMatches(type, PyExc_RecursionError);
}

}  // namespace lazyxla::dispatch
