#include "common/user_line.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace lazyxla {
namespace {

std::vector<std::string>& library_paths() {
  static auto* paths = new std::vector<std::string>();
  return *paths;
}

bool is_users(const std::string& path) {
  for (const std::string& library : library_paths()) {
    if (path.starts_with(library)) return false;
  }
  return path.find("importlib") == std::string::npos;
}

}  // namespace

std::string user_line() {
  if (!Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  auto frame = py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  while (frame) {
    auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    const py::object name = py::reinterpret_borrow<py::object>(
        reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename);
    const auto path = name.cast<std::string>();
    if (is_users(path)) return path + ":" + std::to_string(PyFrame_GetLineNumber(raw));
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return "";
}

std::string user_line_prefix() {
  std::string where = user_line();
  return where.empty() ? "" : where + ": ";
}

void set_library_paths(std::vector<std::string> paths) { library_paths() = std::move(paths); }

}  // namespace lazyxla
