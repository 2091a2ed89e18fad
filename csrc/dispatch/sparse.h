// Sparse tensors: see sparse.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace lazyxla::dispatch {

// Runs an operator with PyTorch's kernel for sparse tensors on the CPU, as a host fallback.
void run_sparse_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Gives `out` the elementwise product of two coordinate lists.
void multiply_sparse(const at::Tensor& x, const at::Tensor& y, at::Tensor& out);

}  // namespace lazyxla::dispatch
