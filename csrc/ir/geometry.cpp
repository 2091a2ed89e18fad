#include "ir/geometry.h"

#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>

namespace lazyxla::ir {
namespace {

int64_t product(c10::IntArrayRef sizes) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return n;
}

}  // namespace

int64_t TensorType::numel() const { return product(dims); }

int64_t TensorType::nbytes() const {
  return numel() * static_cast<int64_t>(c10::elementSize(dtype));
}

int64_t Geometry::numel() const { return product(sizes); }

Geometry Geometry::contiguous(c10::ScalarType dtype, c10::IntArrayRef sizes) {
  Geometry g{dtype, Dims(sizes.begin(), sizes.end()), Dims(sizes.size()), 0};
  int64_t stride = 1;
  bool overflows = false;
  for (size_t i = sizes.size(); i-- > 0;) {
    g.strides[i] = stride;
    if (i > 0) overflows |= c10::mul_overflows(stride, std::max<int64_t>(sizes[i], 1), &stride);
  }
  TORCH_CHECK(!overflows, "Stride calculation overflowed for a tensor of shape ", sizes);
  return g;
}

bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 6> dims;  // (stride, size)
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] != 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (auto [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

bool same_layout(c10::IntArrayRef sizes_a, c10::IntArrayRef strides_a, c10::IntArrayRef sizes_b,
                 c10::IntArrayRef strides_b) {
  if (sizes_a != sizes_b) return false;
  if (strides_a == strides_b) return true;
  for (size_t i = 0; i < sizes_a.size(); ++i) {
    if (sizes_a[i] == 0) return true;
  }
  for (size_t i = 0; i < sizes_a.size(); ++i) {
    if (sizes_a[i] != 1 && strides_a[i] != strides_b[i]) return false;
  }
  return true;
}

}  // namespace lazyxla::ir
