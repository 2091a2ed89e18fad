// Copies of a tensor in which a part is another: select_scatter and its like. PyTorch copies the
// tensor with all that lies in memory between its elements, so that the result has its strides,
// gaps included. A recorded operator sees no memory, and its results have no gaps. It serves
// tensors without gaps; of all others the memory itself is copied, and the part is written as a
// view.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/diagonal_scatter_native.h>
#include <ATen/ops/select_scatter_native.h>
#include <ATen/ops/slice_scatter_native.h>
#include <torch/library.h>

#include "dispatch/recorder.h"
#include "dispatch/tensor.h"

namespace lazyxla::dispatch {
namespace {

using at::Tensor;
using c10::IValue;

const OpInfo& info_of(const char* name) {
  return OpInfo::of(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""));
}

Tensor recorded(const OpInfo& info, std::initializer_list<IValue> args) {
  torch::jit::Stack stack(args);
  record(info, &stack);
  return stack.back().toTensor();
}

bool has_gaps(const Tensor& self) { return !ir::is_dense(self.sizes(), self.strides()); }

Tensor select_scatter(const Tensor& self, const Tensor& src, int64_t dim, int64_t index) {
  if (has_gaps(self)) return at::native::select_scatter_symint(self, src, dim, index);
  static const OpInfo& info = info_of("aten::select_scatter");
  return recorded(info, {self, src, dim, index});
}

Tensor slice_scatter(const Tensor& self, const Tensor& src, int64_t dim,
                     std::optional<int64_t> start, std::optional<int64_t> end, int64_t step) {
  if (has_gaps(self)) return at::native::slice_scatter(self, src, dim, start, end, step);
  static const OpInfo& info = info_of("aten::slice_scatter");
  return recorded(info, {self, src, dim, start, end, step});
}

Tensor diagonal_scatter(const Tensor& self, const Tensor& src, int64_t offset, int64_t dim1,
                        int64_t dim2) {
  if (has_gaps(self)) return at::native::diagonal_scatter(self, src, offset, dim1, dim2);
  static const OpInfo& info = info_of("aten::diagonal_scatter");
  return recorded(info, {self, src, offset, dim1, dim2});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("select_scatter", TORCH_FN(select_scatter));
  m.impl("slice_scatter", TORCH_FN(slice_scatter));
  m.impl("diagonal_scatter", TORCH_FN(diagonal_scatter));
}

}  // namespace
}  // namespace lazyxla::dispatch
