#include "ir/geometry.h"

#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>

namespace lazyxla::ir {
namespace {

// The size of the parts of a dtype's elements: complex numbers are pairs.
int64_t unit_size(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype)) / (c10::isComplexType(dtype) ? 2 : 1);
}

struct Dimension {
  int64_t stride, size;
};
using Dimensions = c10::SmallVector<Dimension, 6>;

// The dimensions along which there are several elements, in units of which each element has
// `ratio`, and the dimension within an element.
Dimensions dimensions_of(const Geometry& g, int64_t ratio) {
  Dimensions result;
  for (size_t i = 0; i < g.sizes.size(); ++i) {
    if (g.sizes[i] > 1 && g.strides[i] > 0) result.push_back({g.strides[i] * ratio, g.sizes[i]});
  }
  if (ratio > 1) result.push_back({1, ratio});
  return result;
}

// The distance from a view's first element to its last one, in a digit of its base; -1 if one of
// its strides is between two positions of that digit.
int64_t reach(const Dimension& digit, const Dimensions& view) {
  int64_t steps = 0;
  for (const Dimension& dim : view) {
    if (dim.stride < digit.stride || dim.stride >= digit.stride * digit.size) continue;
    if (dim.stride % digit.stride != 0) return -1;
    steps += (dim.size - 1) * (dim.stride / digit.stride);
  }
  return steps;
}

// Which digit is to be merged with the next one, so that the view does not carry; -1 if it does
// not.
int conflict(const Dimensions& digits, const Dimensions& view, int64_t offset) {
  for (size_t i = 0; i < digits.size(); ++i) {
    const int64_t steps = reach(digits[i], view);
    if (steps < 0) return static_cast<int>(i);
    const int64_t start = offset / digits[i].stride % digits[i].size;
    if (start + steps >= digits[i].size) return static_cast<int>(i) - 1;
  }
  return -1;
}

}  // namespace

int64_t TensorType::numel() const { return c10::multiply_integers(dims); }

int64_t TensorType::nbytes() const {
  return numel() * static_cast<int64_t>(c10::elementSize(dtype));
}

int64_t Geometry::numel() const { return c10::multiply_integers(sizes); }

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

namespace {

// How many common units an element of the base and one of the view have.
std::pair<int64_t, int64_t> units_of(const Geometry& base, const Geometry& view) {
  if (base.dtype == view.dtype) return {1, 1};
  const int64_t unit = std::min(unit_size(base.dtype), unit_size(view.dtype));
  return {static_cast<int64_t>(c10::elementSize(base.dtype)) / unit,
          static_cast<int64_t>(c10::elementSize(view.dtype)) / unit};
}

}  // namespace

int64_t offset_of(const Geometry& base, const Geometry& view, const Begin& begin) {
  const auto [of_base, of_view] = units_of(base, view);
  const Dimensions dims = dimensions_of(view, of_view);
  int64_t offset = 0, outer = base.numel() * of_base;
  size_t next = 0;
  for (int64_t weight : begin.weights) {
    const Dimension digit{weight, outer / weight};
    if (reach(digit, dims) < digit.size - 1) offset += weight * begin.starts[next++];
    outer = weight;
  }
  return offset / of_view;
}

Begin begin_of(const Geometry& base, const Geometry& view) {
  Begin begin;
  if (view.numel() == 0) return begin;
  const auto [of_base, of_view] = units_of(base, view);
  const int64_t offset = view.offset * of_view;
  const Dimensions dims = dimensions_of(view, of_view);
  Dimensions digits = dimensions_of(base, of_base);
  std::sort(digits.begin(), digits.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; });
  for (int i; (i = conflict(digits, dims, offset)) >= 0;) {
    digits[i] = {digits[i + 1].stride, digits[i].size * digits[i + 1].size};
    digits.erase(digits.begin() + i + 1);
  }
  for (const Dimension& digit : digits) {
    begin.weights.push_back(digit.stride);
    if (reach(digit, dims) < digit.size - 1) {
      begin.starts.push_back(offset / digit.stride % digit.size);
    }
  }
  if (begin.starts.empty()) begin.weights.clear();
  return begin;
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
  if (strides_a == strides_b || c10::multiply_integers(sizes_a) == 0) return true;
  for (size_t i = 0; i < sizes_a.size(); ++i) {
    if (sizes_a[i] != 1 && strides_a[i] != strides_b[i]) return false;
  }
  return true;
}

}  // namespace lazyxla::ir
