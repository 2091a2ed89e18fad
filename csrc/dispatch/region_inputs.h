// Region inputs: a view enters a compiled region as its own elements.
//
// Read as a view, its whole memory would be an input of the program, and memory of another size
// would need another program: a batch of a larger data set, a window of a cache that grows. So the
// elements are copied by a program of their own, before the region, and the region reads the copy.
// It writes to the memory itself, which drops the copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ir/storage.h"

namespace lazyxla::dispatch {

class RegionInputs {
 public:
  RegionInputs() = default;
  ~RegionInputs();
  RegionInputs(const RegionInputs&) = delete;
  RegionInputs& operator=(const RegionInputs&) = delete;

  // A tensor that the region is given, of any device.
  void add(const at::Tensor& tensor);

 private:
  struct Copy {
    c10::Storage storage;
    ir::Value leaf;
  };
  std::vector<Copy> copies_;
};

}  // namespace lazyxla::dispatch
