// Geometry: how a tensor is laid out on its storage.
//
// A storage holds a run of elements in memory order. A tensor on it picks some of them:
//
//     element (i0, i1, ...) is at  offset + i0 * strides[0] + i1 * strides[1] + ...
//
// all counted in elements of `dtype`. Every view operator of PyTorch is a new geometry on the same
// storage. The content of a storage is one IR value of logical shape `sizes`, laid out by a *base*
// geometry: offset 0, strides that are a dense permutation of the dimensions, every element covered
// once (a contiguous tensor, or a channels-last one). Reading through the base geometry is the
// value itself; reading through any other geometry is one `lazyxla::view` node.
//
//     base  (f32, [2, 3], strides [3, 1], 0)   x
//     view  (f32, [3, 2], strides [1, 3], 0)   x.t()
//     view  (f32, [2],    strides [3],    1)   x[:, 1]
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace lazyxla::ir {

using Dims = c10::SmallVector<int64_t, 5>;

// Element type and shape of an IR value: dense, no strides.
struct TensorType {
  c10::ScalarType dtype;
  Dims dims;

  int64_t numel() const;
  int64_t nbytes() const;
  bool operator==(const TensorType&) const = default;
};

struct Geometry {
  c10::ScalarType dtype = c10::ScalarType::Float;
  Dims sizes;
  Dims strides;
  int64_t offset = 0;

  int64_t numel() const;
  int64_t nbytes() const { return numel() * static_cast<int64_t>(c10::elementSize(dtype)); }

  bool operator==(const Geometry&) const = default;

  // Contiguous geometry of the given shape.
  static Geometry contiguous(c10::ScalarType dtype, c10::IntArrayRef sizes);
};

// Where a view begins in its base, split into `weights`, which are the same for all views that
// differ in their offset only, and `starts`, which are not.
//
// The base's dimensions, by stride, are the digits of a mixed-radix number, and an offset is such a
// number. Neighbouring digits are merged until no dimension of the view carries from one into the
// next (lowering/geometry.py). In a digit that the view does not cover it might begin elsewhere;
// its start in that digit is one of `starts`. They count elements; if the dtypes differ, those of
// the narrower dtype.
//
//     base [64, 16], view x[5:9]    weights [16, 1], starts [5]
//     base [64, 16], view x[5, 2]   weights [16, 1], starts [5, 2]
//     base [64, 16], view x.t()     none: it begins where the base begins
struct Begin {
  Dims weights;  // of the digits, outermost first; none if the view begins where the base does
  Dims starts;   // in the digits that the view does not cover
};
Begin begin_of(const Geometry& base, const Geometry& view);

// The view's offset, in its elements; that of `view` is ignored.
int64_t offset_of(const Geometry& base, const Geometry& view, const Begin& begin);

// True if the strides are those of a permuted contiguous tensor: every element once, no gaps. The
// strides of size-1 dimensions are ignored.
bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides);

// True if both describe the same elements in the same logical order (same sizes; strides of size-1
// dimensions and of empty tensors ignored).
bool same_layout(c10::IntArrayRef sizes_a, c10::IntArrayRef strides_a, c10::IntArrayRef sizes_b,
                 c10::IntArrayRef strides_b);

}  // namespace lazyxla::ir
