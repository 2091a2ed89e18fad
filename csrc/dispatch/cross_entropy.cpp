// Cross-entropy of logits against classes is one node forward and one backward, where PyTorch makes
// two each, with log-probabilities as large as the logits between them. The gradient keeps the
// logits, and each sample's maximum and sum of exponentials.
//
// Targets that are probabilities, label smoothing and a single sample are left to PyTorch's
// composition. So is a call that a mode or tensor subclass watches, see linear.cpp, unless it
// traces a graph that lazyxla will lower.
#include <ATen/OpMathType.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss_native.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "dispatch/copies.h"
#include "dispatch/plain_call.h"
#include "dispatch/traced_tensor.h"

namespace lazyxla::dispatch {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kForward =
    "cross_entropy(Tensor input, Tensor target, Tensor? weight, int reduction, int ignore_index) "
    "-> (Tensor loss, Tensor maximum, Tensor log_sum, Tensor total_weight)";
constexpr const char* kBackward =
    "cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor? weight, "
    "int reduction, int ignore_index, Tensor maximum, Tensor log_sum, Tensor total_weight) -> "
    "Tensor";

FourTensors forward_meta(const Tensor& input, const Tensor& target, const OptTensor&,
                         int64_t reduction, int64_t) {
  const auto wide = input.options().dtype(at::toOpMathType(input.scalar_type()));
  const bool reduced = reduction != at::Reduction::None;
  return {at::empty(reduced ? c10::IntArrayRef() : target.sizes(), input.options()),
          at::empty(target.sizes(), wide), at::empty(target.sizes(), wide), at::empty({}, wide)};
}

Tensor backward_meta(const Tensor&, const Tensor& input, const Tensor&, const OptTensor&, int64_t,
                     int64_t, const Tensor&, const Tensor&, const Tensor&) {
  return at::empty(input.sizes(), input.options());
}

Tensor composed(const Tensor& input, const Tensor& target, const OptTensor& weight,
                int64_t reduction, const c10::SymInt& ignore_index, double label_smoothing) {
  return at::native::cross_entropy_loss_symint(input, target, weight, reduction, ignore_index,
                                               label_smoothing);
}

// PyTorch keeps log-probabilities, so that the logits may be written to before the backward pass.
// Here it is a snapshot of the logits, which shares their memory until they are written to.
struct Snapshot : torch::autograd::Function<Snapshot> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext*, const Tensor& input) {
    at::AutoDispatchBelowADInplaceOrView below;
    return snapshot(input);
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) { return grads; }
};

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& target,
                        const OptTensor& weight, int64_t reduction, int64_t ignore_index) {
    static const auto op = operator_named<decltype(forward_meta)>("lazyxla::cross_entropy");
    at::AutoDispatchBelowADInplaceOrView below;
    auto [loss, maximum, log_sum, total] = op.call(input, target, weight, reduction, ignore_index);
    context->save_for_backward({input, target, weight.value_or(Tensor()), maximum, log_sum, total});
    context->saved_data["reduction"] = reduction;
    context->saved_data["ignore_index"] = ignore_index;
    return loss;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op =
        operator_named<decltype(backward_meta)>("lazyxla::cross_entropy_backward");
    const variable_list saved = context->get_saved_variables();
    const Tensor &input = saved[0], &target = saved[1];
    const OptTensor weight = saved[2].defined() ? OptTensor(saved[2]) : std::nullopt;
    const int64_t reduction = context->saved_data["reduction"].toInt();
    const int64_t ignore_index = context->saved_data["ignore_index"].toInt();
    Tensor gradient;
    if (at::GradMode::is_enabled()) {  // the gradient's own gradient is PyTorch's
      const Tensor loss = composed(input, target, weight, reduction, ignore_index, 0);
      gradient = torch::autograd::grad({loss}, {input}, grads, /*retain_graph=*/true,
                                       /*create_graph=*/true)[0];
    } else {
      gradient = op.call(grads[0], input, target, weight, reduction, ignore_index, saved[3],
                         saved[4], saved[5]);
    }
    return {gradient, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

// Whether the weight has one element for each of the logits' classes, and needs no gradient.
bool suits(const OptTensor& weight, const Tensor& input) {
  if (!weight || !weight->defined()) return true;
  return weight->device() == input.device() && weight->scalar_type() == input.scalar_type() &&
         weight->sizes() == c10::IntArrayRef{input.size(1)} && !weight->requires_grad() &&
         !has_tangent(*weight);
}

// Whether the target is a class for each of the logits' samples.
bool suits(const Tensor& target, const Tensor& input) {
  if (target.device() != input.device() || target.scalar_type() != c10::ScalarType::Long) {
    return false;
  }
  c10::DimVector sizes(input.sizes());
  sizes.erase(sizes.begin() + 1);
  return target.sizes() == c10::IntArrayRef(sizes);
}

// Whether these are the logits of a batch.
bool suits(const Tensor& input) {
  const bool is_float8 = input.element_size() == 1;  // which PyTorch refuses
  return input.is_floating_point() && !is_float8 && input.dim() >= 2 && input.numel() > 0 &&
         !has_tangent(input);
}

Tensor cross_entropy(c10::DispatchKeySet keys, const Tensor& input, const Tensor& target,
                     const OptTensor& weight, int64_t reduction, c10::SymInt ignore_index,
                     double label_smoothing) {
  const auto ignored = ignore_index.maybe_as_int();
  const bool plain = is_plain(keys);
  const bool known = plain || (is_traced(input) && is_traced(target));
  if (!known || !ignored || label_smoothing != 0 || !suits(input) || !suits(target, input) ||
      !suits(weight, input)) {
    return composed(input, target, weight, reduction, ignore_index, label_smoothing);
  }
  Tensor kept = input;
  if (at::GradMode::is_enabled() && input.requires_grad()) {
    kept = plain ? Snapshot::apply(input) : input.clone();  // XLA drops the copy
  }
  return CrossEntropy::apply(kept, target, weight, reduction, *ignored);
}

TORCH_LIBRARY_FRAGMENT(lazyxla, m) {
  m.def(kForward);
  m.def(kBackward);
}

TORCH_LIBRARY_IMPL(lazyxla, Meta, m) {
  m.impl("cross_entropy", TORCH_FN(forward_meta));
  m.impl("cross_entropy_backward", TORCH_FN(backward_meta));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("cross_entropy_loss", TORCH_FN(cross_entropy));
}

}  // namespace
}  // namespace lazyxla::dispatch
