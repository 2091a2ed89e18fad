// Layouts that do not exist on the device: sparse, quantized, and nested in strided memory.
//
// PyTorch has a dispatch key for each of them on every backend. Every operator that is called on
// such a tensor or would make one says so in a sentence, instead of listing the backends that have
// a kernel.
//
// Gradients of embeddings are dense, also where sparse ones were asked for.

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/ops/_nested_tensor_size_native.h>
#include <ATen/ops/_nested_tensor_storage_offsets_native.h>
#include <ATen/ops/_nested_tensor_strides_native.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <torch/library.h>

#include <string>

#include "dispatch/op_info.h"
#include "dispatch/recorder.h"

namespace lazyxla::dispatch {
namespace {

[[noreturn]] void refuse(const c10::OperatorHandle& op, const std::string& sentence) {
  C10_THROW_ERROR(NotImplementedError, "lazyxla: " + sentence + " (in " + op.schema().name() + ")");
}

template <const char* const* sentence>
void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  refuse(op, *sentence);
}

constexpr const char* kSparse =
    "sparse tensors do not exist on this device: use dense ones (.to_dense() before they go to the "
    "device), or keep this part of the program on the CPU";
constexpr const char* kQuantized =
    "quantized tensors do not exist on this device: use .dequantize(), float8, or integers with a "
    "scale of their own";
constexpr const char* kNested =
    "nested tensors of strided layout do not exist on this device: use padded ones, or "
    "torch.nested.nested_tensor(..., layout=torch.jagged)";

// nn.TransformerEncoder asks this when it evaluates: padded tensors stay padded.
bool can_be_nested(const at::Tensor&, const at::Tensor&) { return false; }

template <const char* const* sentence>
torch::CppFunction refusal() {
  return torch::CppFunction::makeFromBoxedFunction<&refuse<sentence>>();
}

void warn_of_dense_gradients() {
  TORCH_WARN_ONCE(
      "lazyxla: gradients of embeddings are dense on this device, also with sparse=True: use an "
      "optimizer for dense gradients");
}

at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor& indices,
                              int64_t num_weights, int64_t padding_idx, bool scale_grad_by_freq) {
  warn_of_dense_gradients();
  return at::embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq);
}

void embedding_bag_backward(const c10::OperatorHandle& op, c10::DispatchKeySet,
                            torch::jit::Stack* stack) {
  const OpInfo& info = OpInfo::of(op);
  const size_t position = *op.schema().argumentIndexWithName("sparse");
  c10::IValue& sparse = (*stack)[stack->size() - info.args.size() + position];
  if (sparse.toBool()) warn_of_dense_gradients();
  sparse = false;
  record(info, stack);
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(refusal<&kSparse>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) { m.fallback(refusal<&kSparse>()); }
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) { m.fallback(refusal<&kQuantized>()); }
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) { m.fallback(refusal<&kNested>()); }

// Operators that make such tensors from dense ones.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name :
       {"_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr",
        "_to_sparse_bsc", "_sparse_compressed_tensor_unsafe", "_sparse_compressed_tensor_with_dims",
        "sparse_compressed_tensor.comp_plain_value_size",
        "sparse_compressed_tensor.comp_plain_value", "sparse_mask"}) {
    m.impl(name, refusal<&kSparse>());
  }
  for (const char* name :
       {"quantize_per_tensor", "quantize_per_tensor.tensor_qparams", "quantize_per_tensor_dynamic",
        "quantize_per_tensor.tensors", "quantize_per_channel", "_make_per_tensor_quantized_tensor",
        "_make_per_channel_quantized_tensor"}) {
    m.impl(name, refusal<&kQuantized>());
  }
  for (const char* name :
       {"_nested_tensor_from_tensor_list", "_nested_view_from_buffer",
        "_nested_view_from_buffer_copy", "_nested_from_padded", "_nested_tensor_from_mask"}) {
    m.impl(name, refusal<&kNested>());
  }
  m.impl("_nested_tensor_from_mask_left_aligned", TORCH_FN(can_be_nested));
  m.impl("embedding_sparse_backward", TORCH_FN(embedding_backward));
  m.impl("_embedding_bag_backward",
         torch::CppFunction::makeFromBoxedFunction<&embedding_bag_backward>());
}
// torch.nested.nested_tensor makes one of tensors on the CPU, and asks nobody. Autograd reads its
// sizes where an error would end the process: they are there, and the next operator is refused.
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  m.impl("_nested_tensor_size", TORCH_FN(at::native::_nested_tensor_size));
  m.impl("_nested_tensor_strides", TORCH_FN(at::native::_nested_tensor_strides));
  m.impl("_nested_tensor_storage_offsets", TORCH_FN(at::native::_nested_tensor_storage_offsets));
}
TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  for (const char* name :
       {"_sparse_compressed_tensor_unsafe", "_sparse_compressed_tensor_with_dims"}) {
    m.impl(name, refusal<&kSparse>());
  }
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("embedding_sparse_backward", TORCH_FN(embedding_backward));
}

}  // namespace
}  // namespace lazyxla::dispatch
