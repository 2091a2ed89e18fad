// Sparse tensors: see sparse.cpp.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace lazyxla::dispatch {

// Runs an operator with PyTorch's kernel for sparse tensors on the CPU, as a host fallback.
void run_sparse_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace lazyxla::dispatch
