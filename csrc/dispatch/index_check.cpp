#include "dispatch/index_check.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/aminmax.h>

#include <unordered_map>
#include <unordered_set>

#include "dispatch/checks.h"
#include "dispatch/copies.h"
#include "dispatch/device_state.h"

namespace lazyxla::dispatch {
namespace {

// Which arguments of an operator are its index and the dimension that is indexed.
struct IndexArgs {
  int index;      // position of the index tensor
  int dim;        // position of the dimension, or -1: dimension 0, or -2: all dimensions flattened
  bool negative;  // whether indices from the end are allowed
};

const IndexArgs* index_args(const std::string& functional_name) {
  static const auto& table = *new const std::unordered_map<std::string, IndexArgs>{
      {"aten::embedding", {1, -1, false}},
      {"aten::gather", {2, 1, false}},
      {"aten::index_select", {2, 1, false}},
      {"aten::index_add", {2, 1, false}},
      {"aten::index_copy", {2, 1, false}},
      {"aten::index_fill.int_Scalar", {2, 1, false}},
      {"aten::index_fill.int_Tensor", {2, 1, false}},
      {"aten::index_reduce", {2, 1, false}},
      {"aten::scatter.src", {2, 1, false}},
      {"aten::scatter.value", {2, 1, false}},
      {"aten::scatter.reduce", {2, 1, false}},
      {"aten::scatter.value_reduce", {2, 1, false}},
      {"aten::scatter_add", {2, 1, false}},
      {"aten::scatter_reduce.two", {2, 1, false}},
      {"aten::take", {1, -2, true}},
      {"aten::put", {1, -2, true}},
  };
  auto found = table.find(functional_name);
  return found == table.end() ? nullptr : &found->second;
}

// Operators whose kernels have their own checks of tensors' values: the kernel is called.
bool checks_values(const std::string& functional_name) {
  static const auto& names = *new const std::unordered_set<std::string>{
      "aten::multinomial",
      "aten::masked_scatter",
      "aten::nll_loss_forward",
      "aten::nll_loss2d_forward",
      "aten::bernoulli",
      "aten::bernoulli.Tensor",
      "aten::poisson",
      "aten::binomial",
      "aten::normal.Tensor_float",
      "aten::normal.float_Tensor",
      "aten::normal.Tensor_Tensor",
  };
  return names.count(functional_name) > 0;
}

void check_range(const OpInfo& info, c10::ArrayRef<c10::IValue> args, const at::Tensor& index,
                 int64_t dim, int64_t size, bool negative) {
  if (!index.defined() || index.numel() == 0 || !c10::isIntegralType(index.scalar_type(), false)) {
    return;
  }
  at::Tensor host = index.device().type() == kDeviceType ? to_host(index) : index;
  auto [least, greatest] = at::aminmax(host);
  int64_t low = least.item<int64_t>(), high = greatest.item<int64_t>();
  bool bad_low = low < (negative ? -size : 0), bad_high = high >= size;
  if (!bad_low && !bad_high) return;
  check_as_cpu(info, args, {.real = true});  // has PyTorch's own words for it
  TORCH_CHECK_INDEX(false, "index ", bad_high ? high : low, " is out of bounds for dimension ", dim,
                    " with size ", size, " (in ", info.name, ")");
}

// The targets of our own cross-entropy: lazyxla::cross_entropy(input, target, weight, reduction,
// ignore_index).
void check_classes(c10::ArrayRef<c10::IValue> args) {
  const int64_t classes = args[0].toTensor().size(1);
  const at::Tensor target = to_host(args[1].toTensor());
  const at::Tensor bad =
      target.lt(0).logical_or(target.ge(classes)).logical_and(target.ne(args[4].toInt()));
  if (!bad.any().item<bool>()) return;
  TORCH_CHECK_INDEX(false, "Target ", target.masked_select(bad)[0].item<int64_t>(),
                    " is out of bounds.");
}

}  // namespace

void check_indices(const OpInfo& info, c10::ArrayRef<c10::IValue> args) {
  if (checks_values(info.functional_name)) {
    check_as_cpu(info, args, {.real = true});
    return;
  }
  if (info.name == "lazyxla::cross_entropy") check_classes(args);
  const auto& schema = info.handle.schema().arguments();
  for (size_t i = 0; i < args.size(); ++i) {
    if (info.args[i].kind != ArgKind::kTensorList || schema[i].name() != "indices") continue;
    int64_t dim = 0;
    for (const c10::IValue& index : args[i].toListRef()) {
      if (index.isTensor() && index.toTensor().defined()) {
        check_range(info, args, index.toTensor(), dim, args[0].toTensor().size(dim), true);
      }
      ++dim;
    }
  }
  const IndexArgs* which = index_args(info.functional_name);
  if (!which) return;
  const at::Tensor& self = args[0].toTensor();
  int64_t dim = which->dim >= 0 ? args[which->dim].toInt() : 0;
  if (dim < 0) dim += self.dim();
  int64_t size = which->dim == -2 ? self.numel() : self.dim() == 0 ? 1 : self.size(dim);
  check_range(info, args, args[which->index].toTensor(), dim, size, which->negative);
}

}  // namespace lazyxla::dispatch
