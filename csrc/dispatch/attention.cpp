// scaled_dot_product_attention asks the device which implementation it has. Two of PyTorch's are
// recorded, as one node forward and one backward:
//
// - without dropout the one "for CPU", a pair of plain operators with formulas for the gradients;
// - with dropout the one for other packages to define, as operators of our own: the forward one
//   returns the random stream that it drew from, and the backward one draws from it again. Graphs
//   of torch.compile get them by decompositions (dynamo/attention.py).
//
// What these cannot do is left to PyTorch's composition of matmuls and a softmax.
#include <ATen/Context.h>
#include <ATen/OpMathType.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "dispatch/plain_call.h"
#include "dispatch/traced_tensor.h"

namespace lazyxla::dispatch {
namespace {

using at::Tensor;

// torch.compile may trace with symbols for sizes: reading one as a number would fix it.
bool is_same(const Tensor& a, int64_t i, const Tensor& b, int64_t j) {
  return TORCH_GUARD_OR_FALSE(a.sym_size(i).sym_eq(b.sym_size(j)));
}

// Where it is not, PyTorch on the CPU composes the result, too, which is then contiguous.
bool is_innermost_last(const Tensor& x) {
  return TORCH_GUARD_OR_FALSE(x.sym_size(3).sym_eq(1)) ||
         TORCH_GUARD_OR_FALSE(x.sym_stride(3).sym_eq(1));
}

// Whether the mask may be added to the scores: it has as many dimensions at most, and each of its
// sizes is theirs or one.
bool is_mask_for(const Tensor& mask, const Tensor& query, const Tensor& key) {
  if (mask.dim() > 4) return false;
  const auto fits = [&mask](int64_t from_last, const Tensor& like, int64_t dim) {
    const int64_t own = mask.dim() - from_last;
    return own < 0 || TORCH_GUARD_OR_FALSE(mask.sym_size(own).sym_eq(1)) ||
           is_same(mask, own, like, dim);
  };
  return fits(4, query, 0) && fits(3, query, 1) && fits(2, query, 2) && fits(1, key, 2);
}

// A call that PyTorch's composition refuses has none, so that it does.
bool has_one_node(const Tensor& query, const Tensor& key, const Tensor& value,
                  const std::optional<Tensor>& mask, bool grouped) {
  if (!at::globalContext().userEnabledFlashSDP()) return false;
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4) return false;
  // Keys and values may have fewer heads, each then for a group of the queries' heads.
  const bool same = is_same(query, 0, key, 0) && is_same(query, 0, value, 0) &&
                    is_same(key, 1, value, 1) && is_same(key, 2, value, 2) &&
                    is_same(query, 3, key, 3) && is_same(query, 3, value, 3);
  const c10::SymInt heads = key.sym_size(1);
  if (!same || heads == 0 || query.sym_size(1) % heads != 0) return false;
  if (!grouped && !is_same(query, 1, key, 1)) return false;
  if (!is_innermost_last(query) || !is_innermost_last(key) || !is_innermost_last(value)) {
    return false;
  }
  if (!mask || !mask->defined()) return true;
  return !mask->requires_grad() && is_mask_for(*mask, query, key);
}

int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value,
               const std::optional<Tensor>& mask, double dropout, bool is_causal,
               std::optional<double>, bool grouped) {
  auto backend = at::SDPBackend::math;
  if (has_one_node(query, key, value, mask, grouped)) {
    TORCH_CHECK(dropout >= 0 && dropout <= 1,
                "dropout probability has to be between 0 and 1, but got ", dropout);
    const bool has_mask = mask && mask->defined();
    if (dropout == 0) {
      backend = at::SDPBackend::flash_attention;
    } else if (!(has_mask && is_causal) && (is_plain(query.key_set()) || is_traced(query))) {
      backend = at::SDPBackend::overrideable;
    }
  }
  return static_cast<int64_t>(backend);
}

constexpr const char* kForward =
    "dropout_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, "
    "bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)";
constexpr const char* kBackward =
    "dropout_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, "
    "Tensor result, Tensor logsumexp, Tensor stream, float dropout_p, bool is_causal, "
    "float? scale) -> (Tensor, Tensor, Tensor)";

using OptTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

ThreeTensors forward_meta(const Tensor& query, const Tensor& key, const Tensor&, const OptTensor&,
                          double, bool, std::optional<double>) {
  const auto dtype = at::toOpMathType(query.scalar_type());
  auto sums = at::empty(query.sizes().slice(0, 3), query.options().dtype(dtype));
  return {at::empty(query.sizes(), query.options()), std::move(sums),
          at::empty({2}, query.options().dtype(at::kLong))};
}

ThreeTensors backward_meta(const Tensor&, const Tensor& query, const Tensor& key,
                           const Tensor& value, const OptTensor&, const Tensor&, const Tensor&,
                           const Tensor&, double, bool, std::optional<double>) {
  return {at::empty(query.sizes(), query.options()), at::empty(key.sizes(), key.options()),
          at::empty(value.sizes(), value.options())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& mask,
          double dropout, bool is_causal, bool, std::optional<double> scale) {
  static const auto op = operator_named<decltype(forward_meta)>("lazyxla::dropout_attention");
  auto [result, logsumexp, stream] = op.call(query, key, value, mask, dropout, is_causal, scale);
  return {result, logsumexp, {}, {}, query.sym_size(2), key.sym_size(2), stream, {}, {}};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& mask, std::array<bool, 4>, const Tensor& result, const Tensor& logsumexp,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal,
    const Tensor& stream, const Tensor&, std::optional<double> scale) {
  static const auto op =
      operator_named<decltype(backward_meta)>("lazyxla::dropout_attention_backward");
  const auto given = mask.defined() ? OptTensor(mask) : std::nullopt;
  auto [grad_query, grad_key, grad_value] =
      op.call(grad, query, key, value, given, result, logsumexp, stream, dropout, is_causal, scale);
  return {grad_query, grad_key, grad_value, {}};
}

TORCH_LIBRARY_FRAGMENT(lazyxla, m) {
  m.def(kForward, {at::Tag::nondeterministic_seeded});
  m.def(kBackward);
}

TORCH_LIBRARY_IMPL(lazyxla, Meta, m) {
  m.impl("dropout_attention", TORCH_FN(forward_meta));
  m.impl("dropout_attention_backward", TORCH_FN(backward_meta));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(attention));
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(attention_backward));
}

}  // namespace
}  // namespace lazyxla::dispatch

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &lazyxla::dispatch::choose)
}  // namespace at::native
