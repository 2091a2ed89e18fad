// The Python side of a traced graph's calls: lists of Python tensors in and out.
#pragma once

#include <pybind11/pybind11.h>

namespace lazyxla {

void bind_traced_graph(pybind11::module_& m);

}  // namespace lazyxla
