#include "record/backward_threads.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <utility>

#include "common/compat.h"
#include "common/gil.h"

namespace lazyxla::record {
namespace {

using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);

// A backward pass that does nothing. The thread takes it once it is through with the last one.
struct Nothing final : torch::autograd::Node {
  variable_list apply(variable_list&&) override { return {}; }
};

}  // namespace

void await_backward_thread(c10::DeviceIndex device) {
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  // It has no data, and nothing is recorded.
  const at::Tensor gradient =
      at::empty({0}, at::TensorOptions(c10::Device(c10::DeviceType::PrivateUse1, device)));
  auto nothing = compat::make_owned<NodePointer, Nothing>();
  nothing->add_input_metadata(gradient);
  WithoutGil no_gil;
  torch::autograd::Engine::get_default_engine().execute(
      {{std::move(nothing), 0}}, {gradient}, /*keep_graph=*/false, /*create_graph=*/false,
      /*accumulate_grad=*/true);
}

}  // namespace lazyxla::record
