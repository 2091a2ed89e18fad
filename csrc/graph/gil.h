// Giving up the GIL while waiting.
//
// The graph room runs on any thread, with or without the GIL, and knows nothing else of Python. But
// a thread that holds the GIL and waits for another thread's flush, whose lowering needs the GIL,
// would wait forever. Hence: whoever is about to wait holds a WithoutGil.
#pragma once

#include <Python.h>

namespace lazyxla::graph {

class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace lazyxla::graph
