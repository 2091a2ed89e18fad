// Layouts that do not exist on the device: quantized, and nested in strided memory.
//
// PyTorch has a dispatch key for each of them on every backend. Every operator that is called on
// such a tensor or would make one says so in a sentence, instead of listing the backends that have
// a kernel.

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/ops/_nested_tensor_size_native.h>
#include <ATen/ops/_nested_tensor_storage_offsets_native.h>
#include <ATen/ops/_nested_tensor_strides_native.h>
#include <torch/library.h>

#include <string>

namespace lazyxla::dispatch {
namespace {

[[noreturn]] void refuse(const c10::OperatorHandle& op, const std::string& sentence) {
  C10_THROW_ERROR(NotImplementedError, "lazyxla: " + sentence + " (in " + op.schema().name() + ")");
}

template <const char* const* sentence>
void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  refuse(op, *sentence);
}

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

TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) { m.fallback(refusal<&kQuantized>()); }
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) { m.fallback(refusal<&kNested>()); }

// Operators that make such tensors from dense ones.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
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
}
// torch.nested.nested_tensor makes one of tensors on the CPU, and asks nobody. Autograd reads its
// sizes where an error would end the process: they are there, and the next operator is refused.
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  m.impl("_nested_tensor_size", TORCH_FN(at::native::_nested_tensor_size));
  m.impl("_nested_tensor_strides", TORCH_FN(at::native::_nested_tensor_strides));
  m.impl("_nested_tensor_storage_offsets", TORCH_FN(at::native::_nested_tensor_storage_offsets));
}

}  // namespace
}  // namespace lazyxla::dispatch
