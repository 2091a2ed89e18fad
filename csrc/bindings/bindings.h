// Python's view of what a file of this room binds.
#pragma once

#include <pybind11/pybind11.h>

#include "ir/sharding.h"

namespace lazyxla {

// Modes, regions and syncs (record/scope.h).
void bind_modes(pybind11::module_& m);

// Meshes and shardings. With it install_result_reader, of a function (compiled program, ranks,
// partitions) that tells the tiles of each result: lazyxla/lowering/optimized.py.
void bind_spmd(pybind11::module_& m);

// The processes that the client spans.
void bind_processes(pybind11::module_& m);

// A tuple of (axis, what comes before, size) for each dimension.
pybind11::tuple spec_of(const ir::Sharding& sharding);

// Captured training steps: lazyxla/steps/.
void bind_steps(pybind11::module_& m);

// A traced graph's calls: lists of Python tensors in and out.
void bind_traced_graph(pybind11::module_& m);

}  // namespace lazyxla
