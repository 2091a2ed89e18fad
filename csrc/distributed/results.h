// From the results of recorded collectives to the tensors that c10d's calls were given, and back.
// Reductions that the transport lacks are made of one that it has: a mean is a sum that is divided,
// a premultiplied sum is a sum of tensors that were multiplied before.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/functional.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

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

// The sizes of so many such tensors, stacked.
inline std::vector<int64_t> stacked_sizes(int64_t count, c10::IntArrayRef part) {
  std::vector<int64_t> sizes{count};
  sizes.insert(sizes.end(), part.begin(), part.end());
  return sizes;
}

inline std::vector<at::Tensor> flattened(const std::vector<at::Tensor>& tensors) {
  return c10::fmap(tensors, [](const at::Tensor& x) { return x.reshape({-1}); });
}

inline c10d::ReduceOp::RedOpType transported(const c10d::ReduceOp& op) {
  using Op = c10d::ReduceOp;
  return op.op_ == Op::AVG || op.op_ == Op::PREMUL_SUM ? Op::SUM : op.op_;
}

// The processes' inputs.
inline std::vector<at::Tensor> multiplied(std::vector<at::Tensor> inputs,
                                          const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return inputs;
  const auto* factor = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  for (at::Tensor& x : inputs) {
    TORCH_CHECK_TYPE(x.is_floating_point() || x.is_complex(),
                     "lazyxla: PREMUL_SUM is for floating-point tensors, not ", x.dtype());
    const at::Tensor& by = factor->tensor_factor;
    x = by.defined() ? x.mul(by.to(x.options()).reshape({})) : x.mul(factor->double_factor);
  }
  return inputs;
}

// Their results.
inline std::vector<at::Tensor> averaged(std::vector<at::Tensor> sums, const c10d::ReduceOp& op,
                                        int64_t processes) {
  if (op.op_ != c10d::ReduceOp::AVG) return sums;
  for (at::Tensor& x : sums) {
    x = x.is_floating_point() || x.is_complex() ? x.div(processes)
                                                : x.div(processes, /*rounding_mode=*/"trunc");
  }
  return sums;
}

}  // namespace lazyxla::distributed
