#include "dispatch/traced_graph.h"

#include "dispatch/device_state.h"
#include "dispatch/generator.h"
#include "dispatch/recorder.h"
#include "dispatch/tensor.h"
#include "graph/counters.h"

namespace lazyxla::dispatch {

using ir::Arg;
using ir::Value;

TracedGraph::TracedGraph(int64_t number, size_t inputs, std::vector<ir::Geometry> outputs,
                         bool random)
    : spec_(new ir::OpSpec()), outputs_(std::move(outputs)) {
  spec_->name = "lazyxla::graph";
  Arg operands{.kind = Arg::Kind::kList};
  operands.list.resize(inputs, Arg{.kind = Arg::Kind::kOperand});
  spec_->args = {Arg{.kind = Arg::Kind::kConstant, .constant = number}, std::move(operands)};
  for (const ir::Geometry& g : outputs_) spec_->outputs.push_back({g.dtype, g.sizes});
  spec_->random = random;
  if (random) spec_->slots.assign(2, {c10::ScalarType::Long, true, ir::SlotKind::kRandom});
}

std::vector<at::Tensor> TracedGraph::operator()(const std::vector<at::Tensor>& inputs) const {
  TORCH_CHECK(!inputs.empty(), "lazyxla: a traced graph needs a tensor to know its device");
  c10::DeviceIndex device = inputs[0].device().index();
  for (const at::Tensor& input : inputs) {
    TORCH_CHECK(input.device() == c10::Device(kDeviceType, device),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                inputs[0].device(), " and ", input.device(), "! (in a compiled graph)");
  }
  c10::SmallVector<ir::ScalarValue, 2> slots;
  if (spec_->random) {
    auto [seed, ordinal] = at::check_generator<Generator>(default_generator(device))->draw();
    slots.push_back({.i = static_cast<int64_t>(seed)});
    slots.push_back({.i = static_cast<int64_t>(ordinal)});
  }
  std::vector<at::Tensor> results;
  for (const ir::Geometry& g : outputs_) {
    results.emplace_back(make_tensor(g.dtype, g.sizes, g.strides, device));
  }
  {
    ir::Garbage garbage;
    std::vector<Value> operands;
    ir::PendingSet& pending = ir::PendingSet::of(device);
    std::lock_guard lock(pending.mutex);
    for (const at::Tensor& input : inputs) operands.push_back(read(*input.unsafeGetTensorImpl()));
    ir::NodePtr node = ir::Node::make(spec_, operands, slots);
    for (size_t i = 0; i < results.size(); ++i) {
      write(*results[i].unsafeGetTensorImpl(), {node, static_cast<uint32_t>(i)}, garbage);
    }
    ++pending.nodes_recorded;
  }
  ++graph::Counters::get().nodes_recorded;
  after_recording(device, spec_->id);
  return results;
}

}  // namespace lazyxla::dispatch
