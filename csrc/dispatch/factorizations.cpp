// Factorizations with check_errors=True raise at the call, as PyTorch's kernels do: whether one
// failed is in its result `info`, which is read.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_linalg_check_errors.h>
#include <torch/library.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "dispatch/recorder.h"
#include "record/capture.h"

namespace lazyxla::dispatch {
namespace {

// The operators, and what their errors call them.
const std::unordered_map<std::string, const char*>& names() {
  static const auto* all = new std::unordered_map<std::string, const char*>{
      {"aten::linalg_cholesky_ex", "linalg.cholesky_ex"},
      {"aten::linalg_inv_ex", "linalg.inv_ex"},
      {"aten::linalg_lu_factor_ex", "torch.linalg.lu_factor_ex"},
      {"aten::linalg_ldl_factor_ex", "torch.linalg.ldl_factor_ex"},
      {"aten::_linalg_solve_ex", "torch.linalg.solve_ex"},
  };
  return *all;
}

void factorize(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const OpInfo& info = OpInfo::of(op);
  const auto args = torch::jit::last(*stack, info.args.size());
  const bool is_matrix = args[0].toTensor().dim() == 2;
  const int position = *op.schema().argumentIndexWithName("check_errors");
  const auto checks = std::exchange(stack->at(stack->size() - args.size() + position), false);
  record(info, stack);
  const bool readable = record::Capture::current() == nullptr;
  if (checks.toBool() && readable) {
    at::_linalg_check_errors(stack->back().toTensor(), names().at(op.schema().name()), is_matrix);
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name :
       {"linalg_cholesky_ex", "linalg_cholesky_ex.L", "linalg_inv_ex", "linalg_inv_ex.inverse",
        "linalg_lu_factor_ex", "linalg_lu_factor_ex.out", "linalg_ldl_factor_ex",
        "linalg_ldl_factor_ex.out", "_linalg_solve_ex", "_linalg_solve_ex.result"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&factorize>());
  }
}

}  // namespace
}  // namespace lazyxla::dispatch
