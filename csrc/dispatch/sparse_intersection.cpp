// Elements that two coordinate lists share: what PyTorch's kernels for sparse tensors leave to each
// device, as stubs. They are made of operators on indices and values, which are recorded: how many
// elements a result has does not depend on the data.

#include <ATen/ExpandUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <tuple>
#include <vector>

#include "dispatch/sparse.h"

// PyTorch exports these, but has no public header for them.
namespace at::native {
using FlattenIndices = Tensor (*)(const Tensor&, IntArrayRef);
using MulSparse = void (*)(Tensor&, const Tensor&, const Tensor&);
using SparseMask = void (*)(Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&);
using SparseProjection = void (*)(Tensor&, const Tensor&, const Tensor&,
                                  const std::optional<Tensor>&, bool);
DECLARE_DISPATCH(FlattenIndices, flatten_indices_stub)
DECLARE_DISPATCH(MulSparse, mul_sparse_sparse_out_stub)
DECLARE_DISPATCH(SparseMask, sparse_mask_intersection_out_stub)
DECLARE_DISPATCH(SparseProjection, sparse_mask_projection_out_stub)
}  // namespace at::native

namespace lazyxla::dispatch {
namespace {

// The row-major position (n) of each element of indices (dimensions, n).
at::Tensor flat_index(const at::Tensor& indices, at::IntArrayRef sizes) {
  at::Tensor flat = at::zeros({indices.size(1)}, indices.options().dtype(at::kLong));
  for (int64_t dim = 0; dim < indices.size(0); ++dim) {
    flat = flat.mul(sizes[dim]).add(indices.select(0, dim));
  }
  return flat;
}

at::Tensor flat_index_of(const at::Tensor& x) {
  return flat_index(x._indices(), x.sizes().slice(0, x.sparse_dim()));
}

// A vector, with dimensions of size 1 behind it, so that it broadcasts to values.
at::Tensor like_values(const at::Tensor& vector, const at::Tensor& values) {
  std::vector<int64_t> shape(values.dim(), 1);
  shape[0] = vector.numel();
  return vector.reshape(shape);
}

at::Tensor zero_unless(const at::Tensor& condition, const at::Tensor& values) {
  return at::where(like_values(condition, values), values, at::zeros({}, values.options()));
}

// Where the elements of one list are in another, which may be in any order.
class Matches {
 public:
  // `is_unique`: no element of the other is there twice, if it is marked as coalesced. PyTorch's
  // kernels of masks mark lists that are sorted only.
  Matches(const at::Tensor& source, const at::Tensor& other, bool is_unique)
      : is_unique_(is_unique && other.is_coalesced()), sorted_(flat_index_of(other)) {
    if (!other.is_coalesced()) {
      at::Tensor order;
      std::tie(sorted_, order) = at::sort(sorted_, /*stable=*/std::optional(true), /*dim=*/0);
      order_ = order;
    }
    const at::Tensor wanted = flat_index_of(source);
    first_ = at::searchsorted(sorted_, wanted);
    count_ = at::searchsorted(sorted_, wanted, /*out_int32=*/false, /*right=*/true).sub(first_);
  }

  // How many there are of each of source's.
  const at::Tensor& count() const { return count_; }

  // The sum of the values of other's elements that are where source's are.
  at::Tensor sums(const at::Tensor& values) const {
    const int64_t size = values.size(0);
    if (size == 0) {
      auto shape = values.sizes().vec();
      shape[0] = count_.numel();
      return at::zeros(shape, values.options());
    }
    at::Tensor sums = order_ ? values.index_select(0, *order_) : values;
    if (!is_unique_) {  // those of one place are added up at the first of them
      const at::Tensor place = at::searchsorted(sorted_, sorted_);
      sums = at::zeros(values.sizes(), values.options()).index_add(0, place, sums);
    }
    return zero_unless(count_.gt(0), sums.index_select(0, first_.clamp_max(size - 1)));
  }

 private:
  bool is_unique_;
  at::Tensor sorted_, first_, count_;
  std::optional<at::Tensor> order_;
};

void check_operands(const at::Tensor& x, const at::Tensor& y) {
  const int64_t dims = x.sparse_dim();
  TORCH_CHECK(
      x.dim() == y.dim() && dims == y.sparse_dim() &&
          x.sizes().slice(0, dims) == y.sizes().slice(0, dims),
      "sparse_binary_op_intersection_cpu(): expects sparse inputs with equal dimensionality, "
      "number of sparse dimensions, and shape of sparse dimensions");
}

void check_written(const at::Tensor& x, const at::Tensor& y, const at::Tensor& res,
                   const char* where = "") {
  const auto dtype = at::result_type(x, y);
  TORCH_CHECK(canCast(dtype, res.scalar_type()), "Can't convert result type ", dtype, " to output ",
              res.scalar_type(), where);
}

void give(at::Tensor& res, const at::Tensor& indices, const at::Tensor& values,
          at::IntArrayRef shape, bool is_coalesced) {
  auto* impl = at::sparse::get_sparse_impl(res);
  const int64_t dims = indices.size(0);
  impl->raw_resize_(dims, static_cast<int64_t>(shape.size()) - dims, shape);
  impl->set_indices_and_values_unsafe(indices, values.to(res.scalar_type()));
  impl->set_nnz_and_narrow(indices.size(1));
  impl->set_coalesced(is_coalesced);
}

// The operands of a product: each element of the first is multiplied with the other's.
std::tuple<at::Tensor, at::Tensor> source_and_other(const at::Tensor& x, const at::Tensor& y) {
  const bool second =
      x.is_coalesced() == y.is_coalesced() ? x._nnz() >= y._nnz() : x.is_coalesced();
  return second ? std::make_tuple(y, x) : std::make_tuple(x, y);
}

void multiply(at::Tensor& res, const at::Tensor& x, const at::Tensor& y) {
  check_operands(x, y);
  // PyTorch's kernels store only what both have, where they can merge the lists.
  const bool merges = x.is_coalesced() && y.is_coalesced() && x.sizes() == y.sizes();
  check_written(x, y, res, merges ? " in mul operation" : "");
  const auto dtype = at::result_type(x, y);
  const auto shape = at::infer_size(x.sizes(), y.sizes());
  const auto [source, other] = source_and_other(x, y);
  const Matches matches(source, other, /*is_unique=*/true);
  at::Tensor indices = source._indices().clone();
  at::Tensor values =
      zero_unless(matches.count().gt(0),
                  source._values().to(dtype).mul(matches.sums(other._values().to(dtype))));
  if (merges) {
    const at::Tensor both = matches.count().nonzero().squeeze(1);
    indices = indices.index_select(1, both);
    values = values.index_select(0, both);
  }
  give(res, indices, values, shape, source.is_coalesced());
}

// For each element of the mask, what `x` has there.
void mask(at::Tensor& res, const at::Tensor& x, const at::Tensor& mask,
          const std::optional<at::Tensor>& sorted_x) {
  check_operands(x, mask);
  check_written(x, mask, res);
  const at::Tensor values = Matches(mask, x, /*is_unique=*/!sorted_x).sums(x._values());
  give(res, mask._indices().clone(), values, at::infer_size(x.sizes(), mask.sizes()),
       mask.is_coalesced());
}

// The elements of `x`, and zeros where the mask has none.
void project(at::Tensor& res, const at::Tensor& mask, const at::Tensor& x,
             const std::optional<at::Tensor>&, bool accumulate_matches) {
  check_operands(mask, x);
  check_written(mask, x, res);
  const at::Tensor count = Matches(x, mask, /*is_unique=*/false).count();
  at::Tensor values = x._values();
  if (accumulate_matches) values = values.mul(like_values(count, values).to(values.scalar_type()));
  give(res, x._indices().clone(), zero_unless(count.gt(0), values),
       at::infer_size(mask.sizes(), x.sizes()), x.is_coalesced());
}

}  // namespace

void multiply_sparse(const at::Tensor& x, const at::Tensor& y, at::Tensor& out) {
  multiply(out, x, y);
}

}  // namespace lazyxla::dispatch

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(flatten_indices_stub, &lazyxla::dispatch::flat_index)
REGISTER_PRIVATEUSE1_DISPATCH(mul_sparse_sparse_out_stub, &lazyxla::dispatch::multiply)
REGISTER_PRIVATEUSE1_DISPATCH(sparse_mask_intersection_out_stub, &lazyxla::dispatch::mask)
REGISTER_PRIVATEUSE1_DISPATCH(sparse_mask_projection_out_stub, &lazyxla::dispatch::project)
}  // namespace at::native
