#include "steps/step_program.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "common/compat.h"
#include "common/counters.h"
#include "dispatch/region_inputs.h"
#include "graph/runner.h"
#include "graph/transfer.h"
#include "record/flush.h"
#include "steps/guards.h"

namespace lazyxla::steps {
namespace {

using program::BufferRef;

// A history that was used up, as a loss has it after backward().
void set_used_history(at::Tensor& tensor) {
  static const std::string* message = new std::string(
      "Trying to backward through the graph a second time (or directly access saved tensors after "
      "they have already been freed). Saved intermediate values of the graph are freed when you "
      "call .backward() or autograd.grad(). (lazyxla: the tensor is the result of a captured step, "
      "which has called backward())");
  using NodePointer = decltype(torch::autograd::Edge::function);
  auto node = compat::make_owned<NodePointer, torch::autograd::Error>(*message);
  const auto number = node->add_input_metadata(tensor);
  torch::autograd::impl::set_gradient_edge(tensor, {std::move(node), number});
}

// The leaf that a tensor is read as; null if it is not data. Caller holds the mutex.
const ir::Value* leaf_of(const ir::Storage& storage, const ir::Geometry* copied) {
  const ir::Value* value = copied ? storage.find_view(*copied) : &storage.value();
  const bool is_data = value && *value && !storage.is_pending() && value->node->is_leaf();
  return is_data ? value : nullptr;
}

}  // namespace

std::string StepProgram::find(c10::ArrayRef<at::Tensor> arguments,
                              std::vector<at::Tensor>& tensors) const {
  tensors.reserve(sources_.size());
  for (const Source& source : sources_) {
    switch (source.kind) {
      case Source::kState:
        tensors.push_back(state_[source.index]);
        break;
      case Source::kArgument:
        tensors.push_back(arguments[source.index]);
        break;
      case Source::kGradient:
        tensors.push_back(state_[source.index].grad());
        break;
    }
  }
  for (const Gradient& gradient : gradients_) {
    const at::Tensor& now = state_[gradient.state].grad();
    if (now.defined() != (gradient.source >= 0)) {
      return now.defined() ? "there are gradients now" : "there are no gradients now";
    }
    if (!now.defined()) continue;
    if (const char* why = unfit_gradient(now)) return std::string("a gradient ") + why;
    if (!(geometry_of(now) == sources_[gradient.source].view)) {
      return "a gradient is laid out in another way";
    }
  }
  return "";
}

std::string StepProgram::run(c10::ArrayRef<at::Tensor> tensors,
                             std::vector<at::Tensor>& made) const {
  record::flush(device_, record::Cause::kMode);
  dispatch::RegionInputs views;
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i].copied) views.add(tensors[i]);
  }

  made.reserve(fresh_.size());
  for (const Fresh& fresh : fresh_) {
    const auto nbytes = static_cast<size_t>(fresh.base.nbytes());
    std::optional<c10::InferenceMode> mode;
    if (fresh.inference != c10::InferenceMode::is_enabled()) mode.emplace(fresh.inference);
    made.emplace_back(dispatch::make_tensor(fresh.base, nbytes, device_));
    if (!(fresh.geometry == fresh.base)) {
      made.back().unsafeGetTensorImpl()->set_sizes_and_strides(
          fresh.geometry.sizes, fresh.geometry.strides, fresh.geometry.offset);
    }
  }

  std::vector<BufferRef> inputs(taped_.leaves.size()), promises;
  std::vector<int> donated;
  std::vector<ir::ScalarValue> slots = taped_.slots;
  std::vector<graph::Replaced> replaced;
  std::vector<ir::Draws> draws;
  std::optional<graph::ExecutionSlot> slot;
  {
    ir::Garbage garbage;  // dropped after the mutex
    std::vector<const ir::Node*> leaves(taped_.leaves.size(), nullptr);
    c10::SmallVector<ir::Storage*, 128> storages;
    std::lock_guard lock(ir::device_mutex(device_));
    for (size_t i = 0; i < sources_.size(); ++i) {
      const Source& source = sources_[i];
      ir::Storage& storage = storage_of(tensors[i]);
      storages.push_back(&storage);
      if (source.leaf < 0 && source.output < 0) continue;
      if (source.kind == Source::kState && storage.id() != source.storage) {
        return "a tensor has other memory";
      }
      const ir::Value* leaf = leaf_of(storage, source.copied ? &source.view : nullptr);
      if (!leaf || !(storage.base() == source.base)) return "memory lies in another way";
      if (storage.sharding() != source.sharding) return "a tensor is spread in another way";
      if (source.leaf < 0) continue;
      if (!(leaf->type() == taped_.leaf_types[source.leaf])) return "memory lies in another way";
      if (program::buffer_of(*leaf->node.get()).sharding() != taped_.leaf_shardings[source.leaf]) {
        return "a tensor is spread in another way";
      }
      leaves[source.leaf] = leaf->node.get();
    }
    c10::SmallVector<ir::Storage*, 128> sorted = storages;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      return "two tensors share memory";
    }

    slot = graph::ExecutionSlot::take(device_);
    std::vector<ir::Value> promised;
    for (size_t i = 0; i < taped_.output_types.size(); ++i) {
      promises.push_back(program::make_buffer());
      if (taped_.variant->partition) {
        promises.back()->promise_sharding(taped_.variant->results()[i]);
      }
      promised.push_back({ir::Node::make_leaf(taped_.output_types[i], promises.back()), 0});
    }
    for (size_t i = 0; i < sources_.size(); ++i) {
      const int output = sources_[i].output;
      if (output < 0) continue;
      replaced.push_back({storages[i]->id(), {storages[i]->value(), nullptr}, promises[output]});
      storages[i]->set_leaf(promised[output], garbage);
    }
    for (size_t i = 0; i < fresh_.size(); ++i) {
      ir::Storage& storage = storage_of(made[i]);
      storage.set_sharding(fresh_[i].sharding);
      storage.set_leaf(promised[fresh_[i].output], garbage);
    }
    // The replaced values are held by the list above and by the garbage.
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (taped_.aliases[i] >= 0 && program::dies_with(*leaves[i], 2)) {
        donated.push_back(static_cast<int>(i));
      }
    }
    for (size_t i = 0; i < leaves.size(); ++i) inputs[i] = program::buffer_ref(*leaves[i]);
  }
  if (taped_.generator) {
    c10::GeneratorImpl& generator = *taped_.generator;
    std::lock_guard lock(generator.mutex_);
    const uint64_t first = generator.get_offset();
    draws.push_back({taped_.generator, generator.current_seed(), first, first + taped_.draws});
    generator.set_offset(first + taped_.draws);
    for (const graph::Tape::Random& random : taped_.random) {
      slots[random.seed].i = static_cast<int64_t>(draws.back().seed);
      slots[random.ordinal].i = static_cast<int64_t>(first + random.drawn);
    }
  }
  ++Counters::get().captured_steps;
  const graph::Run run{inputs, donated, slots, promises, replaced, draws};
  slot->run_now(taped_.variant, run);

  for (size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i].output >= 0) tensors[i].unsafeGetTensorImpl()->bump_version();
  }
  for (size_t i = 0; i < fresh_.size(); ++i) {
    if (fresh_[i].requires_grad) set_used_history(made[i]);
  }
  return "";
}

void StepProgram::keep_gradients(std::vector<at::Tensor>& made) const {
  for (const Gradient& gradient : gradients_) {
    if (gradient.fresh < 0) continue;
    at::Tensor state = state_[gradient.state];
    state.mutable_grad() = made[gradient.fresh];
  }
  made.resize(results_);
}

void set_number(const at::Tensor& tensor, double number) {
  const ir::TensorType type{tensor.scalar_type(), {}};
  const auto value = static_cast<float>(number);
  const bool is_double = type.dtype == c10::ScalarType::Double;
  const void* data = is_double ? static_cast<const void*>(&number) : &value;
  ir::Value leaf = graph::upload(data, type, tensor.device().index());
  ir::Storage& storage = storage_of(tensor);
  ir::Garbage garbage;
  std::lock_guard lock(storage.mutex());
  storage.set_leaf(std::move(leaf), garbage);
}

}  // namespace lazyxla::steps
