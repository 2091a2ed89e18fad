// Python's view of meshes and shardings.
#pragma once

#include <pybind11/pybind11.h>

#include "ir/sharding.h"

namespace lazyxla {

// With it install_result_reader, of a function (compiled program, ranks, partitions) that tells the
// tiles of each result: lazyxla/lowering/optimized.py.
void bind_spmd(pybind11::module_& m);

// A tuple of (axis, what comes before, size) for each dimension.
pybind11::tuple spec_of(const ir::Sharding& sharding);

}  // namespace lazyxla
