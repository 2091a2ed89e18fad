// Captured training steps for Python: lazyxla/steps/.
#pragma once

#include <pybind11/pybind11.h>

namespace lazyxla {

void bind_steps(pybind11::module_& m);

}  // namespace lazyxla
