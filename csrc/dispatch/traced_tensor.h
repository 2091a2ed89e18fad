// Tensors that stand for others while AOTAutograd traces a graph for torch.compile.
#pragma once

#include <ATen/core/Tensor.h>

namespace lazyxla::dispatch {

// Whether this thread traces a graph that lazyxla will lower, which may thus have operators of its
// own. Returns what it was before.
bool trace_for_lazyxla(bool on);

// Whether the tensor is one with which PyTorch traces such a graph, of sizes that are numbers: no
// other subclass, and no symbols.
bool is_traced(const at::Tensor& x);

}  // namespace lazyxla::dispatch
