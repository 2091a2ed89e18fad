// Sparse tensors: PyTorch's own SparseTensorImpl and SparseCsrTensorImpl, whose indices and values
// are dense tensors of the device.
//
// An operator on them runs in one of three ways:
//
// - By PyTorch's kernel for sparse tensors on the CPU, where that is written for every device: it
//   takes the tensor apart, calls operators on indices and values, which are recorded, and puts
//   the result together. PyTorch registers these kernels for CPU and CUDA alike. What they leave
//   to each device is in sparse_intersection.cpp.
// - By a kernel of lazyxla/sparse.py, in place of kernels that read memory: they are recorded, too.
// - On the host (host.h), the rest.
//
// How many elements are stored is known when an operator is called, so that operators whose
// result's number depends on the data (coalesce, to_sparse) read it, as nonzero does.

#include "dispatch/sparse.h"

#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/SparseTensorUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <string>

#include "dispatch/host.h"
#include "dispatch/op_info.h"
#include "dispatch/recorder.h"

namespace lazyxla::dispatch {
namespace {

using c10::DispatchKey;

// Calls PyTorch's kernel of another key with the tensors as they are.
template <DispatchKey key>
void as_for(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.callBoxedForDispatchKey(key, *stack);
}

template <DispatchKey key>
torch::CppFunction kernel_of() {
  return torch::CppFunction::makeFromBoxedFunction<&as_for<key>>();
}

// Gives `target` the content of a result on the CPU, as the host fallback does with written
// tensors.
at::Tensor copy_from_host(const at::Tensor& result, const at::Tensor& target) {
  if (target.layout() == at::kSparse) {
    // A tensor with elements of its own cannot be resized to any other.
    at::sparse::get_sparse_impl(target)->resize_and_clear_(result.sparse_dim(), result.dense_dim(),
                                                           result.sizes());
    target.copy_(result);
  } else {
    const at::Tensor there = result.to(target.device());
    const auto [outer, inner] = at::sparse_csr::getCompressedPlainIndices(there);
    at::sparse_csr::get_sparse_csr_impl(target)->set_member_tensors(outer, inner, there.values(),
                                                                    there.sizes());
  }
  return target;
}

void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  run_sparse_on_host(op, stack);
}

bool is_compressed(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         at::sparse_csr::is_sparse_compressed(value.toTensor());
}

// clang-format off: a name in each line would hide the rest.

// Elementwise operators that keep zeros: the functional, in-place and out= form of each.
constexpr std::initializer_list<const char*> kElementwise = {
    "abs",    "asin",  "asinh", "atan", "atanh", "ceil", "deg2rad", "erf",
    "erfinv", "expm1", "floor", "frac", "log1p", "neg",  "rad2deg", "round",
    "sgn",    "sign",  "sin",   "sinh", "sqrt",  "tan",  "tanh",    "trunc"};

// Further ones that both layouts have.
constexpr std::initializer_list<const char*> kBoth = {
    "_nnz", "_to_dense", "_to_sparse", "_to_sparse.sparse_dim", "add.Tensor", "add_.Tensor",
    "clone", "conj_physical.out", "copy_", "dense_dim", "empty.memory_format", "empty_like",
    "isinf", "isnan", "isneginf", "isneginf.out", "isposinf", "isposinf.out", "mul.Tensor",
    "mul_.Tensor", "relu", "relu_", "resize_as_sparse_", "signbit", "signbit.out", "sparse_dim",
    "sparse_mask", "sum", "sum.dim_IntList", "threshold_backward", "threshold_backward.grad_input",
    "values", "zero_"};

// Those of coordinate lists (COO).
constexpr std::initializer_list<const char*> kCoordinates = {
    "_coalesced_", "_dimI", "_dimV", "_indices", "_sparse_broadcast_to",
    "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors",
    "_sparse_mask_projection", "_to_sparse_bsc", "_to_sparse_bsr", "_to_sparse_csc",
    "_to_sparse_csr", "_values", "any", "cat", "copy_sparse_to_sparse_", "div.Tensor",
    "div.Tensor_mode", "div.out", "div.out_mode", "div_.Tensor", "div_.Tensor_mode", "floor_divide",
    "floor_divide.out", "floor_divide_.Tensor", "indices", "is_coalesced", "mm", "mm.out", "mv",
    "nan_to_num", "nan_to_num.out", "nan_to_num_", "narrow_copy", "native_norm",
    "native_norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "permute",
    "pow.Tensor_Scalar", "pow.Tensor_Scalar_out", "sparse_resize_", "sparse_resize_and_clear_",
    "sub.Tensor", "sub.out", "sub_.Tensor", "unsqueeze", "view_as_complex", "view_as_real",
    "zeros.out"};

// Those of compressed rows or columns, of elements or blocks (CSR, CSC, BSR, BSC).
constexpr std::initializer_list<const char*> kCompressed = {
    "_conj_physical", "addmm", "angle", "angle.out", "ccol_indices", "col_indices",
    "conj_physical_", "crow_indices", "fill_.Scalar", "mul.Scalar", "mul.out", "mul_.Scalar",
    "normal_", "resize_", "row_indices", "select.int", "select_copy.int"};
// clang-format on

template <DispatchKey key>
void register_kernels(torch::Library& m, std::initializer_list<const char*> of_layout) {
  for (const char* base : kElementwise) {
    const std::string name = base;
    for (const std::string& form : {name, name + "_", name + ".out"}) {
      m.impl(form.c_str(), kernel_of<key>());
    }
  }
  for (const auto& names : {kBoth, of_layout}) {
    for (const char* name : names) m.impl(name, kernel_of<key>());
  }
}

// PyTorch's kernel for the CPU reads no memory, except to multiply lists of the same shape.
void mul_out(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto args = torch::jit::last(*stack, 3);
  const at::Tensor x = args[0].toTensor(), y = args[1].toTensor();
  at::Tensor out = args[2].toTensor();
  if (x.is_sparse() && y.is_sparse() && out.is_sparse() && x.dim() > 0 && x.sizes() == y.sizes() &&
      x._nnz() > 0 && y._nnz() > 0) {
    multiply_sparse(x, y, out);
    torch::jit::drop(*stack, 3);
    torch::jit::push(*stack, std::move(out));
  } else {
    op.callBoxedForDispatchKey(DispatchKey::SparseCPU, *stack);
  }
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  register_kernels<DispatchKey::SparseCPU>(m, kCoordinates);
  m.impl("mul.out", torch::CppFunction::makeFromBoxedFunction<&mul_out>());
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_host));
}
TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  register_kernels<DispatchKey::SparseCsrCPU>(m, kCompressed);
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_host));
}

// Its gradient is sparse where the user asked for that: PyTorch's kernel makes it.
void embedding_bag_backward(const c10::OperatorHandle& op, c10::DispatchKeySet,
                            torch::jit::Stack* stack) {
  const OpInfo& info = OpInfo::of(op);
  const size_t position = *op.schema().argumentIndexWithName("sparse");
  if ((*stack)[stack->size() - info.args.size() + position].toBool()) {
    op.callBoxedForDispatchKey(DispatchKey::CPU, *stack);
  } else {
    record(info, stack);
  }
}

// Operators that make sparse tensors of dense ones.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_csr",
                           "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc", "sparse_mask"}) {
    m.impl(name, kernel_of<DispatchKey::CPU>());
  }
  m.impl("_embedding_bag_backward",
         torch::CppFunction::makeFromBoxedFunction<&embedding_bag_backward>());
}

}  // namespace

void run_sparse_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto args = torch::jit::last(*stack, op.schema().arguments().size());
  const bool compressed = std::ranges::any_of(args, is_compressed);
  const DispatchKey key = compressed ? DispatchKey::SparseCsrCPU : DispatchKey::SparseCPU;
  const OpInfo& info = OpInfo::of(op);
  if (!op.hasComputedKernelForDispatchKey(key)) {
    C10_THROW_ERROR(NotImplementedError, "lazyxla: PyTorch has no kernel for sparse tensors of " +
                                             info.name + ": use dense ones (.to_dense())");
  }
  run_checked_on_host(info, stack, "has no kernel for sparse tensors on this device", key);
}

}  // namespace lazyxla::dispatch
