// Hooks of leaves' gradients, among them the one that spreads the gradient of a sharded leaf.
//
// PyTorch adds up a leaf's gradient and gives it to the leaf without an operator of which the leaf
// is an operand. So a sharded leaf has a hook, a function in Python (lazyxla/spmd.py), since a
// tensor's hooks are either all of Python or all of C++. It does what the leaf's sharding says, and
// nothing else.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

#include <utility>
#include <vector>

namespace lazyxla::dispatch {

// All functions are called under the GIL.

// Sets the function, once.
void set_spreading_hook(PyObject* function);

// Whether a tensor has hooks of its gradient besides that one.
bool has_other_hooks(const at::Tensor& tensor);

// Whether any of these leaves is sharded, and those that are and do not have the hook, or have a
// gradient that is not sharded alike.
std::pair<bool, std::vector<at::Tensor>> find_unspread(const std::vector<at::Tensor>& leaves);

}  // namespace lazyxla::dispatch
