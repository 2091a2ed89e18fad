// What C++ knows of Python: the GIL, and the end of Python's threads.
//
// C++ runs on any thread, with or without the GIL. But a thread that holds the GIL and waits for
// another thread's flush, whose lowering needs the GIL, would wait forever. Hence a thread that is
// about to wait holds a WithoutGil.
#pragma once

#include <Python.h>

#include <functional>

#include "common/locks.h"

namespace lazyxla {

class WithoutGil {
 public:
  WithoutGil() {
    check_none_held();
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

// Calls `handler`, with the GIL, when the calling thread's state of Python is cleared, which is
// before Thread.join() returns in another thread. Not at all if the thread has none. To be called
// without any of our mutexes.
void at_python_threads_end(std::function<void()> handler);

}  // namespace lazyxla
