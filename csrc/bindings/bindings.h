// Python's view of what a file of this room binds.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <type_traits>
#include <utility>

#include "ir/sharding.h"
#include "program/workers.h"

namespace lazyxla::bindings {

using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// Modes, regions and syncs (record/scope.h).
void bind_modes(pybind11::module_& m);

// Meshes and shardings. With it install_result_reader, of a function (compiled program, ranks,
// partitions) that returns the tiles of each result: lazyxla/lowering/optimized.py.
void bind_spmd(pybind11::module_& m);

// The processes that the client spans.
void bind_processes(pybind11::module_& m);

// A tuple of (axis, size of the parts before, size) for each dimension.
pybind11::tuple spec_of(const ir::Sharding& sharding);

// Captured training steps: lazyxla/steps/.
void bind_steps(pybind11::module_& m);

// A traced graph's calls: lists of Python tensors in and out.
void bind_traced_graph(pybind11::module_& m);

// What is kept on disk: lazyxla/cache.
void bind_cache(pybind11::module_& m);

// How new graphs become programs: lazyxla/planning.
void bind_planner(pybind11::module_& m);

// Checks of operators' arguments: lazyxla/argument_checks.
void bind_checks(pybind11::module_& m);

// Sparse tensors' operators that run on the host: lazyxla/sparse.py.
void bind_sparse(pybind11::module_& m);

// Calls `work`, which calls Python, on a worker.
template <typename Work>
auto in_python(Work work) {
  static_assert(!std::is_base_of_v<pybind11::handle, decltype(work())>);  // it needs the GIL
  program::NeedsInterpreter needs_interpreter;
  pybind11::gil_scoped_acquire gil;
  return work();
}

// A Python function that C++ calls until the process ends: it is never freed.
inline const pybind11::function& kept(pybind11::function function) {
  return *new pybind11::function(std::move(function));
}

// For owners that may drop it on a thread without the GIL.
std::shared_ptr<pybind11::object> owned_without_gil(pybind11::object object);

// Dynamo's function that sets which callback watches this thread, and returns the former. Looked up
// once; two threads that do so at the same time find the same.
inline const pybind11::object& set_eval_frame() {
  static std::atomic<const pybind11::object*> found{nullptr};
  if (!found) {
    found = new pybind11::object(
        pybind11::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame"));
  }
  return *found.load();
}

// Calls a Python function of ours from wherever an operator or a flush happens to be. If Dynamo
// traces that thread it would try to compile our Python code: it is disabled meanwhile.
template <typename... Args>
pybind11::object call_unwatched(const pybind11::object& function, Args&&... args) {
  const pybind11::object& set = set_eval_frame();
  pybind11::object callback = set(pybind11::none());
  try {
    pybind11::object result = function(std::forward<Args>(args)...);
    set(callback);
    return result;
  } catch (pybind11::error_already_set&) {
    set(callback);
    throw;
  }
}

}  // namespace lazyxla::bindings
