// scaled_dot_product_attention asks the device which implementation it has. The one that PyTorch
// calls "for CPU" is a pair of plain operators with formulas for the gradients; as such it is
// recorded here, one node forward and one backward. What those operators cannot do is left to
// PyTorch's composition of products and a softmax.
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>

namespace lazyxla::dispatch {
namespace {

using at::Tensor;

bool has_one_node(const Tensor& query, const Tensor& key, const Tensor& value,
                  const std::optional<Tensor>& mask, double dropout) {
  if (!at::globalContext().userEnabledFlashSDP() || dropout != 0) return false;
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4) return false;
  // Only the heads of keys and values may be fewer, each then for a group of queries' heads.
  bool same = query.size(0) == key.size(0) && query.size(0) == value.size(0) &&
              key.size(1) == value.size(1) && key.size(2) == value.size(2) &&
              query.size(3) == key.size(3) && query.size(3) == value.size(3);
  if (!same || key.size(1) == 0 || query.size(1) % key.size(1) != 0) return false;
  return !mask || !mask->defined() || !mask->requires_grad();
}

int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value,
               const std::optional<Tensor>& mask, double dropout, bool, std::optional<double>,
               bool) {
  bool one_node = has_one_node(query, key, value, mask, dropout);
  return static_cast<int64_t>(one_node ? at::SDPBackend::flash_attention : at::SDPBackend::math);
}

}  // namespace
}  // namespace lazyxla::dispatch

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &lazyxla::dispatch::choose)
}  // namespace at::native
