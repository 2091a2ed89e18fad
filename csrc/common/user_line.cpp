#include "common/user_line.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace lazyxla {
namespace {

auto& library_paths = *new std::vector<std::string>();

bool is_users(const std::string& path) {
  for (const std::string& library : library_paths) {
    if (path.starts_with(library)) return false;
  }
  return path.find("importlib") == std::string::npos;
}

// As UTF-8. A path may hold bytes that are not, which Python keeps as lone surrogates.
std::string text_of(PyObject* path) {
  const auto bytes = py::reinterpret_steal<py::bytes>(
      PyUnicode_AsEncodedString(path, "utf-8", "backslashreplace"));
  if (!bytes) throw py::error_already_set();
  return bytes;
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
    const std::string path = text_of(reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename);
    if (is_users(path)) return path + ":" + std::to_string(PyFrame_GetLineNumber(raw));
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return "";
}

std::string user_line_prefix() {
  std::string where = user_line();
  return where.empty() ? "" : where + ": ";
}

void set_library_paths(std::vector<std::string> paths) { library_paths = std::move(paths); }

}  // namespace lazyxla
