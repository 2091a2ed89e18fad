// Tensors that stand for others while torch.compile traces.
#pragma once

#include <ATen/core/Tensor.h>

namespace lazyxla::dispatch {

// Whether it is one of those with which PyTorch traces a graph, of sizes that are numbers: no other
// subclass, and no symbols.
bool is_traced(const at::Tensor& x);

}  // namespace lazyxla::dispatch
