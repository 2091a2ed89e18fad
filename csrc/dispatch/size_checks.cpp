#include "dispatch/size_checks.h"

#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <unordered_map>

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using Args = c10::ArrayRef<IValue>;
using Sizes = c10::IntArrayRef;

bool given(const IValue& value) { return value.isTensor() && value.toTensor().defined(); }

void check_index_reduce(Args args) {
  const at::Tensor& self = args[0].toTensor();
  const at::Tensor& index = args[2].toTensor();
  const at::Tensor& source = args[3].toTensor();
  if (self.dim() == 0 || self.dim() != source.dim()) return;  // others refuse that
  int64_t dim = c10::maybe_wrap_dim(args[1].toInt(), self.dim());
  auto other = [dim](const at::Tensor& tensor) {
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes.erase(sizes.begin() + dim);
    return sizes;
  };
  TORCH_CHECK(other(self) == other(source),
              "source tensor shape must match self tensor shape, excluding the specified "
              "dimension. Got self.shape = ",
              self.sizes(), " source.shape = ", source.sizes());
  TORCH_CHECK(index.numel() == source.size(dim), "index_reduce_(): Number of indices (",
              index.numel(), ") should be equal to source.size(dim): (", source.size(dim),
              "), for dim: ", dim);
}

void check_linear(Args args) {
  const at::Tensor& weight = args[1].toTensor();
  if (!given(args[2]) || weight.dim() != 2) return;
  std::vector<int64_t> result = args[0].toTensor().sizes().vec();
  result.back() = weight.size(0);
  at::inferExpandGeometry_dimvector(args[2].toTensor().sizes(), args[2].toTensor().strides(),
                                    result);
}

void check_softmax_backward(Args args) {
  Sizes grad = args[0].toTensor().sizes(), output = args[1].toTensor().sizes();
  TORCH_CHECK(grad == output, "Expected tensor for argument #1 'grad' to have same size as tensor ",
              "for argument #2 'output'; but ", grad, " does not equal ", output);
}

void check_group_norm(Args args) {
  int64_t channels = args[4].toInt();
  int64_t elements = 0;
  bool fits = args[3].toInt() >= 0 && args[5].toInt() >= 0 &&
              !c10::mul_overflows(args[3].toInt(), channels, &elements) &&
              !c10::mul_overflows(elements, args[5].toInt(), &elements) &&
              elements == args[0].toTensor().numel();
  TORCH_CHECK(fits, "Expected X.numel() == N * C * HxW to be true, but got X of shape ",
              args[0].toTensor().sizes(), ", N = ", args[3].toInt(), ", C = ", channels,
              ", HxW = ", args[5].toInt());
  for (int i : {1, 2}) {
    if (!given(args[i])) continue;
    const at::Tensor& tensor = args[i].toTensor();
    TORCH_CHECK(tensor.dim() == 1 && tensor.numel() == channels, "Expected ",
                i == 1 ? "weight" : "bias",
                " to be a vector of size equal to the number of channels in input, but got one of "
                "shape ",
                tensor.sizes(), " and input of shape ", args[0].toTensor().sizes());
  }
}

// The statistics, weight and bias of a batch normalization, wherever the schema has them.
void check_batch_norm(const OpInfo& info, Args args) {
  const at::Tensor& input = args[0].toTensor();
  if (input.dim() < 2) return;  // others refuse that
  const auto& schema = info.handle.schema().arguments();
  for (size_t i = 1; i < args.size(); ++i) {
    const std::string& name = schema[i].name();
    bool of_channels =
        name == "weight" || name == "bias" || name == "running_mean" || name == "running_var";
    if (!of_channels || !given(args[i])) continue;
    TORCH_CHECK(args[i].toTensor().numel() == input.size(1), name, " should contain ",
                input.size(1), " elements not ", args[i].toTensor().numel());
  }
}

void check_soft_margin_loss(Args args) {
  Sizes input = args[0].toTensor().sizes(), target = args[1].toTensor().sizes();
  auto broadcast = at::infer_size(target, input);
  TORCH_CHECK(Sizes(broadcast) == input, "output with shape ", input,
              " doesn't match the broadcast shape ", broadcast);
}

void check_addmv(Args args) {
  const at::Tensor& self = args[0].toTensor();
  const at::Tensor& matrix = args[1].toTensor();
  TORCH_CHECK(self.numel() == 1 || self.numel() == matrix.size(0), "size mismatch, got input (",
              self.size(0), "), mat (", matrix.size(0), "x", matrix.size(1), ")");
}

void check_householder(Args args) {
  const at::Tensor& tau = args[1].toTensor();
  const at::Tensor& other = args[2].toTensor();
  bool left = args[3].toBool();
  int64_t most = std::min(other.size(left ? -2 : -1), args[0].toTensor().size(-1));
  TORCH_CHECK(tau.size(-1) == most,
              "torch.ormqr: tau.shape[-1] must be equal to min(other.shape[-2], input.shape[-1])");
}

void check_lu_unpack(Args args) {
  const at::Tensor& lu = args[0].toTensor();
  const at::Tensor& pivots = args[1].toTensor();
  if (lu.dim() < 2) return;
  Sizes batch = lu.sizes().slice(0, lu.dim() - 2);
  bool fits = pivots.dim() == lu.dim() - 1 && pivots.sizes().slice(0, batch.size()) == batch &&
              pivots.size(-1) >= std::min(lu.size(-2), lu.size(-1));
  TORCH_CHECK(fits, "torch.lu_unpack: LU_pivots of shape ", pivots.sizes(),
              " does not fit LU_data of shape ", lu.sizes());
}

void check_embedding_bag(Args args) {
  bool starts = args[2].toTensor().numel() > 0 || args[1].toTensor().numel() == 0;
  TORCH_CHECK(starts || !given(args[6]),
              "embedding_bag: per_sample_weights for indices that belong to no bag: there are no "
              "offsets");
}

void check_histogram(Args args) {
  TORCH_CHECK(args[1].toTensor().numel() > 1,
              "torch.histogram(): bins must be > 0, but got 0 for dimension 0");
}

void check_convolved(Args args, const Inference& inference) {
  Sizes sizes = inference.results[0].geometry.sizes;
  if (args[0].toTensor().numel() == 0) return;  // the CPU's kernel is asked about that
  for (int64_t size : sizes.slice(std::min<size_t>(2, sizes.size()))) {
    TORCH_CHECK(size > 0, "Calculated output size per channel: ", sizes.slice(2),
                ". Output size is too small");
  }
}

void check_upsampled(const Inference& inference) {
  Sizes sizes = inference.results[0].geometry.sizes;
  for (int64_t size : sizes.slice(std::min<size_t>(2, sizes.size()))) {
    TORCH_CHECK(size > 0, "Input and output sizes should be greater than 0, but got output ",
                sizes.slice(2));
  }
}

const std::unordered_map<std::string, void (*)(Args)>& checks() {
  static const auto& table = *new const std::unordered_map<std::string, void (*)(Args)>{
      {"aten::index_reduce", check_index_reduce},
      {"aten::linear", check_linear},
      {"aten::_softmax_backward_data", check_softmax_backward},
      {"aten::_log_softmax_backward_data", check_softmax_backward},
      {"aten::native_group_norm", check_group_norm},
      {"aten::soft_margin_loss", check_soft_margin_loss},
      {"aten::addmv", check_addmv},
      {"aten::ormqr", check_householder},
      {"aten::histogram.bins_tensor", check_histogram},
  };
  return table;
}

}  // namespace

void check_for_kernel(const OpInfo& info, Args args) {
  const std::string& name = info.functional_name;
  if (name == "aten::lu_unpack") {
    check_lu_unpack(args);
  } else if (name == "aten::_embedding_bag" || name == "aten::_embedding_bag_forward_only") {
    check_embedding_bag(args);
  } else if (name.find("batch_norm") != name.npos && name.find("backward") == name.npos) {
    check_batch_norm(info, args);
  }
}

void check_sizes(const OpInfo& info, Args args, const Inference& inference) {
  const std::string& name = info.functional_name;
  if (auto found = checks().find(name); found != checks().end()) {
    found->second(args);
  } else if (name == "aten::convolution") {
    check_convolved(args, inference);
  } else if (name.find("upsample_") != name.npos && name.find("backward") == name.npos) {
    check_upsampled(inference);
  }
}

}  // namespace lazyxla::dispatch
