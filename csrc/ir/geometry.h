// Geometry: how a tensor lies on its storage.
//
// A storage holds a run of elements in memory order. A tensor on it picks some of them:
//
//     element (i0, i1, ...)  lives at  offset + i0 * strides[0] + i1 * strides[1] + ...
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

// True if the strides are those of a permuted contiguous tensor: every element once, no gaps. The
// strides of size-1 dimensions say nothing and are ignored.
bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides);

// True if both describe the same elements in the same logical order (same sizes; strides of size-1
// dimensions and of empty tensors ignored).
bool same_layout(c10::IntArrayRef sizes_a, c10::IntArrayRef strides_a, c10::IntArrayRef sizes_b,
                 c10::IntArrayRef strides_b);

}  // namespace lazyxla::ir
