// From the results of recorded collectives to the tensors that c10d's calls were given, and back.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

namespace lazyxla::distributed {

// Writes a result to a tensor of as many elements.
inline void write_one(const at::Tensor& target, const at::Tensor& value) {
  target.copy_(value.sizes() == target.sizes() ? value : value.reshape(target.sizes()));
}

inline void write(const std::vector<at::Tensor>& targets, const std::vector<at::Tensor>& values) {
  TORCH_CHECK_VALUE(targets.size() == values.size(), "lazyxla: ", values.size(),
                    " tensors were expected for the results, not ", targets.size());
  for (size_t i = 0; i < targets.size(); ++i) write_one(targets[i], values[i]);
}

// The sizes of one such tensor for each process, stacked.
inline std::vector<int64_t> whole_sizes(const at::Tensor& part, int64_t processes) {
  std::vector<int64_t> sizes{processes};
  sizes.insert(sizes.end(), part.sizes().begin(), part.sizes().end());
  return sizes;
}

inline std::vector<at::Tensor> flattened(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& x : tensors) flat.push_back(x.reshape({-1}));
  return flat;
}

}  // namespace lazyxla::distributed
