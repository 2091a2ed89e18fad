#include "dispatch/indexing.h"

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "dispatch/recorder.h"

namespace lazyxla::dispatch {
namespace {

using OptTensor = std::optional<at::Tensor>;

bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == c10::ScalarType::Bool ||
         index.scalar_type() == c10::ScalarType::Byte;
}

c10::IValue& argument(const OpInfo& info, torch::jit::Stack* stack, int position) {
  return (*stack)[stack->size() - info.args.size() + position];
}

void check_device(const at::Tensor& self, const at::Tensor& index) {
  TORCH_CHECK(index.is_cpu() || index.device() == self.device(),
              "indices should be either on cpu or on the same device as the indexed tensor (",
              self.device(), ")");
}

void check_mask(const at::Tensor& self, const at::Tensor& mask, int64_t dim) {
  if (mask.scalar_type() == c10::ScalarType::Byte) {
    TORCH_WARN(
        "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool "
        "instead.");
  }
  for (int64_t i = 0; i < mask.dim(); ++i) {
    TORCH_CHECK_INDEX(dim + i < self.dim(), "too many indices for tensor of dimension ",
                      self.dim());
    TORCH_CHECK_INDEX(mask.size(i) == self.size(dim + i), "The shape of the mask ", mask.sizes(),
                      " at index ", i, " does not match the shape of the indexed tensor ",
                      self.sizes(), " at index ", dim + i);
  }
}

bool has_copies(const at::Tensor& self) {
  return at::has_internal_overlap(self) == at::MemOverlap::Yes;
}

// Whether a dimension's elements are one element in memory.
bool is_expanded(const at::Tensor& self, int64_t dim) {
  return self.stride(dim) == 0 && self.size(dim) > 1;
}

// Each expanded dimension with one of its elements.
at::Tensor without_copies(at::Tensor self) {
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (is_expanded(self, dim)) self = self.narrow(dim, 0, 1);
  }
  return self;
}

// An element that is written by any of its copies is written.
at::Tensor mask_without_copies(const at::Tensor& self, at::Tensor mask) {
  const int64_t before = self.dim() - mask.dim();
  for (int64_t dim = 0; dim < mask.dim(); ++dim) {
    if (before + dim < 0 || mask.size(dim) != self.size(before + dim)) continue;
    if (is_expanded(self, before + dim)) mask = mask.any(dim, /*keepdim=*/true);
  }
  return mask;
}

c10::List<OptTensor> indices_without_copies(const at::Tensor& self, const c10::IValue& indices) {
  c10::List<OptTensor> result;
  for (const c10::IValue& index : indices.toListRef()) {
    const auto dim = static_cast<int64_t>(result.size());
    if (!index.isTensor() || !index.toTensor().defined()) {
      result.push_back(std::nullopt);
    } else if (dim < self.dim() && is_expanded(self, dim)) {
      result.push_back(at::zeros_like(index.toTensor()));
    } else {
      result.push_back(index.toTensor());
    }
  }
  return result;
}

// The values to put where no dimension is expanded: of those that are written to the copies of an
// element, which lie along the dimensions without an index, the last one or the sum is left. Copies
// that are told apart by an index remain several writes of one element. Null if PyTorch refuses the
// call.
OptTensor values_without_copies(const at::Tensor& self, const c10::IValue& indices,
                                const at::Tensor& values, bool accumulate) {
  if (values.numel() == 1 && !accumulate) return values;
  std::vector<int64_t> of_indices, shape, expanded;
  std::vector<bool> is_indexed(self.dim());
  int64_t dim = 0, first = -1, last = -1;
  for (const c10::IValue& index : indices.toListRef()) {
    if (index.isTensor() && index.toTensor().defined()) {
      if (dim >= self.dim()) return std::nullopt;
      is_indexed[dim] = true;
      of_indices = at::infer_size(of_indices, index.toTensor().sizes());
      last = dim;
      if (first < 0) first = dim;
    }
    ++dim;
  }
  if (first < 0) return std::nullopt;
  // The indices' dimensions come where the indices are, or first if these are not side by side.
  const auto inside = std::count(is_indexed.begin() + first, is_indexed.begin() + last + 1, true);
  const int64_t place = inside == last + 1 - first ? first : 0;
  const auto count = static_cast<int64_t>(of_indices.size());
  for (int64_t i = 0; i < self.dim(); ++i) {
    if (is_indexed[i]) continue;
    const auto position = static_cast<int64_t>(shape.size());
    if (is_expanded(self, i)) expanded.push_back(position < place ? position : position + count);
    shape.push_back(self.size(i));
  }
  shape.insert(shape.begin() + place, of_indices.begin(), of_indices.end());
  TORCH_CHECK(at::is_expandable_to(values.sizes(), shape), "shape mismatch: value tensor of shape ",
              values.sizes(), " cannot be broadcast to indexing result of shape ",
              c10::IntArrayRef(shape));
  at::Tensor result = values.expand(shape);
  if (expanded.empty()) return result;
  if (accumulate) return result.sum(expanded, /*keepdim=*/true, values.scalar_type());
  for (const int64_t i : expanded) result = result.narrow(i, result.size(i) - 1, 1);
  return result;
}

void warn_of_copies(std::string_view name, const char* also) {
  TORCH_WARN("Use of ", name,
             " on expanded tensors is deprecated. Please clone() the tensor before performing "
             "this operation.",
             also);
}

constexpr const char* kByIndex =
    " This also applies to advanced indexing e.g. tensor[indices] = tensor";
constexpr const char* kByMask =
    " This also applies to advanced indexing e.g. tensor[mask] = scalar";

}  // namespace

int indices_argument(const OpInfo& info) {
  const auto& args = info.handle.schema().arguments();
  for (size_t i = 0; i < args.size(); ++i) {
    if (info.args[i].kind == ArgKind::kTensorList && args[i].name() == "indices") return i;
  }
  return -1;
}

void expand_indices(const OpInfo& info, torch::jit::Stack* stack) {
  int position = indices_argument(info);
  c10::IValue& list = argument(info, stack, position);
  const at::Tensor self = argument(info, stack, 0).toTensor();
  c10::List<OptTensor> expanded;
  for (const c10::IValue& element : list.toListRef()) {
    if (!element.isTensor() || !element.toTensor().defined()) {
      expanded.push_back(std::nullopt);
      continue;
    }
    at::Tensor index = element.toTensor();
    check_device(self, index);
    if (!is_mask(index)) {
      expanded.push_back(index.to(self.device()));
      continue;
    }
    check_mask(self, index, static_cast<int64_t>(expanded.size()));
    at::Tensor positions = index.nonzero().to(self.device());
    for (int64_t i = 0; i < index.dim(); ++i) expanded.push_back(positions.select(1, i));
  }
  list = expanded;
}

bool fills_where_asked(const OpInfo& info) {
  return info.name == "aten::masked_fill_.Scalar" || info.name == "aten::masked_fill_.Tensor" ||
         info.name == "aten::index_fill_.int_Scalar" ||
         info.name == "aten::index_fill_.int_Tensor" || info.name == "aten::index_put_" ||
         info.name == "aten::_index_put_impl_";
}

bool fill_once(const OpInfo& info, torch::jit::Stack* stack) {
  const at::Tensor self = argument(info, stack, 0).toTensor();
  if (!has_copies(self)) return false;
  if (info.functional_name.starts_with("aten::masked_fill")) {
    warn_of_copies("masked_fill_", kByMask);
    c10::IValue& mask = argument(info, stack, 1);
    mask = mask_without_copies(self, mask.toTensor());
  } else if (info.functional_name.starts_with("aten::index_fill")) {
    warn_of_copies("index_fill_", kByMask);
    const int64_t dim = at::maybe_wrap_dim(argument(info, stack, 1).toInt(), self.dim());
    c10::IValue& index = argument(info, stack, 2);
    if (is_expanded(self, dim)) index = at::zeros_like(index.toTensor());
  } else {
    const bool accumulate = argument(info, stack, 3).toBool();
    const c10::IValue& indices = argument(info, stack, 1);
    const auto values =
        values_without_copies(self, indices, argument(info, stack, 2).toTensor(), accumulate);
    if (!values) return false;
    warn_of_copies("index_put_", kByIndex);
    argument(info, stack, 2) = *values;
    argument(info, stack, 1) = indices_without_copies(self, indices);
  }
  argument(info, stack, 0) = without_copies(self);
  record(info, stack);
  stack->back() = self;
  return true;
}

bool fill_by_mask(const OpInfo& info, torch::jit::Stack* stack) {
  const bool in_place = info.name == "aten::_index_put_impl_" || info.name == "aten::index_put_";
  if (!in_place && info.name != "aten::index_put") return false;
  at::Tensor self = argument(info, stack, 0).toTensor();
  at::Tensor values = argument(info, stack, 2).toTensor();
  bool accumulate = argument(info, stack, 3).toBool();
  if (accumulate || values.numel() != 1) return false;
  at::Tensor mask;
  int64_t before = 0;
  for (const c10::IValue& element : argument(info, stack, 1).toListRef()) {
    if (!element.isTensor() || !element.toTensor().defined()) {
      if (!mask.defined()) ++before;
      continue;
    }
    if (mask.defined() || !is_mask(element.toTensor())) return false;
    mask = element.toTensor();
  }
  if (!mask.defined()) return false;
  check_device(self, mask);
  check_mask(self, mask, before);
  std::vector<int64_t> shape(self.dim(), 1);
  for (int64_t i = 0; i < mask.dim(); ++i) shape[before + i] = mask.size(i);
  mask = mask.to(self.device()).view(shape);
  if (!in_place) self = self.clone();
  if (in_place && has_copies(self)) warn_of_copies("index_put_", kByIndex);
  self.masked_fill_(mask, values.to(self.device(), self.scalar_type()).view(c10::IntArrayRef()));
  torch::jit::drop(*stack, info.args.size());
  stack->emplace_back(std::move(self));
  return true;
}

}  // namespace lazyxla::dispatch
