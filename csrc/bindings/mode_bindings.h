// Python's side of modes, regions and syncs (record/scope.h).
#pragma once

#include <pybind11/pybind11.h>

namespace lazyxla {

void bind_modes(pybind11::module_& m);

}  // namespace lazyxla
