// Operators that PyTorch composes for all devices, in kernels that read their arguments' memory
// (`Tensor::data_ptr`) as if it were the CPU's. There is none behind a tensor of this device, so
// the process would end.
#include <ATen/ops/reshape.h>
#include <torch/library.h>

#include "dispatch/host.h"
#include "dispatch/op_info.h"

namespace lazyxla::dispatch {
namespace {

void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  run_checked_on_host(OpInfo::of(op), stack, "reads the memory of its arguments",
                      c10::DispatchKey::CPU);
}

// These make or take weights that are packed for the CPU's instructions, or write to them though
// their schema does not say so.
void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "lazyxla: ", OpInfo::of(op).name,
      " is about weights that are packed for the CPU, and takes no tensors of this device: "
      "move them to the CPU first");
}

// A view of what the shape says, which may be on the CPU.
at::Tensor reshape_from_tensor(const at::Tensor& self, const at::Tensor& shape) {
  TORCH_CHECK(shape.dim() == 1, "lazyxla: _reshape_from_tensor: the shape is ", shape.sizes(),
              ", not a row of sizes");
  const at::Tensor sizes = shape.to(at::device(at::kCPU).dtype(at::kLong)).contiguous();
  return at::reshape(self, {sizes.const_data_ptr<int64_t>(), static_cast<size_t>(sizes.numel())});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name :
       {"_grid_sampler_2d_cpu_fallback", "_grid_sampler_2d_cpu_fallback.out",
        "_grid_sampler_2d_cpu_fallback_backward", "_sobol_engine_draw", "_sobol_engine_ff_",
        "_sobol_engine_initialize_state_", "_sobol_engine_scramble_", "choose_qparams_optimized"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
  }
  for (const char* name :
       {"_saturate_weight_to_fp16", "fbgemm_linear_fp16_weight", "fbgemm_linear_fp16_weight.out",
        "fbgemm_linear_fp16_weight_fp32_activation",
        "fbgemm_linear_fp16_weight_fp32_activation.out", "fbgemm_linear_int8_weight",
        "fbgemm_linear_int8_weight_fp32_activation", "fbgemm_linear_quantize_weight",
        "fbgemm_pack_gemm_matrix_fp16", "fbgemm_pack_quantized_matrix",
        "fbgemm_pack_quantized_matrix.KN"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
  m.impl("_reshape_from_tensor", &reshape_from_tensor);
}

// Without a kernel of its own for this key the operator would have no gradient.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_reshape_from_tensor", &reshape_from_tensor);
}

}  // namespace
}  // namespace lazyxla::dispatch
