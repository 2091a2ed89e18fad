#include "common/gil.h"

#include <memory>

namespace lazyxla {
namespace {

constexpr const char* kName = "lazyxla.at_threads_end";

void call(PyObject* capsule) {
  using Handler = std::function<void()>;
  std::unique_ptr<Handler> handler(static_cast<Handler*>(PyCapsule_GetPointer(capsule, kName)));
  (*handler)();
}

}  // namespace

void at_python_threads_end(std::function<void()> handler) {
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return;
  const PyGILState_STATE gil = PyGILState_Ensure();
  if (PyObject* locals = PyThreadState_GetDict()) {
    auto owned = std::make_unique<std::function<void()>>(std::move(handler));
    if (PyObject* capsule = PyCapsule_New(owned.get(), kName, call)) {
      owned.release();
      PyDict_SetItemString(locals, kName, capsule);
      Py_DECREF(capsule);
    }
    if (PyErr_Occurred()) PyErr_Clear();
  }
  PyGILState_Release(gil);
}

}  // namespace lazyxla
