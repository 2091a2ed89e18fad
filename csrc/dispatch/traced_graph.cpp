#include "dispatch/traced_graph.h"

#include <ATen/EmptyTensor.h>

#include "common/counters.h"
#include "common/locks.h"
#include "dispatch/generator.h"
#include "dispatch/recorder.h"
#include "dispatch/scan.h"
#include "dispatch/settling.h"
#include "dispatch/tensor.h"
#include "program/buffer.h"
#include "record/recording.h"
#include "record/settings.h"

namespace lazyxla::dispatch {
namespace {

using ir::Arg;
using ir::Value;

auto& graph_dropped = *new std::function<void(int64_t)>();

ir::ScalarValue slot_value(const c10::TensorImpl& tensor, const ir::SlotSpec& spec) {
  c10::Scalar number = number_of(tensor);
  if (spec.kind == ir::SlotKind::kFloat) return {.f = number.toDouble()};
  return {.i = number.toLong()};
}

// Prefetches the memory that is read when a program runs on the tensors. After a large program none
// of it is in the processor's caches, and following pointers from object to object waits for each.
// Caller holds the mutex.
void prefetch(c10::ArrayRef<c10::TensorImpl*> tensors) {
  constexpr size_t kLine = 64;
  auto fetch = [](const void* object, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += kLine) {
      __builtin_prefetch(static_cast<const char*>(object) + i);
    }
  };
  auto node = [](const c10::TensorImpl* tensor) { return storage_of(*tensor).value().node.get(); };
  for (const c10::TensorImpl* tensor : tensors) {
    if (!is_lazy(*tensor)) continue;
    fetch(tensor->unsafe_storage().unsafeGetStorageImpl(), sizeof(ir::Storage));
  }
  for (const c10::TensorImpl* tensor : tensors) {
    if (is_lazy(*tensor)) fetch(node(tensor), sizeof(ir::Node) + sizeof(ir::TensorType));
  }
  for (const c10::TensorImpl* tensor : tensors) {
    if (!is_lazy(*tensor) || !node(tensor)) continue;
    fetch(node(tensor)->leaf_data().get(), sizeof(program::DeviceBuffer));
  }
}

}  // namespace

// Owns the OpSpec, which the nodes point to.
class TracedGraph::Lifetime final : public ir::LeafData {
 public:
  explicit Lifetime(int64_t number) : number_(number) {}
  ~Lifetime() override {
    if (graph_dropped) graph_dropped(number_);
  }
  ir::OpSpec spec;  // as it is called with the settings of its making

  // As it is called with torch's settings of now.
  const ir::OpSpec& current_spec() {
    const uint16_t settings = record::record_settings();
    if (settings == spec.settings) return spec;
    const auto others = others_.hold();
    for (const auto& other : *others) {
      if (other->settings == settings) return *other;
    }
    others->push_back(std::make_unique<ir::OpSpec>(spec));
    others->back()->settings = settings;
    return *others->back();
  }

 private:
  Guarded<std::vector<std::unique_ptr<ir::OpSpec>>, SpinLock> others_;
  int64_t number_;
};

TracedGraph::TracedGraph(Description description)
    : device_(description.device),
      inputs_(std::move(description.inputs)),
      results_(std::move(description.results)),
      writes_(std::move(description.writes)),
      lifetime_(std::make_shared<Lifetime>(description.number)) {
  ir::OpSpec& spec = lifetime_->spec;
  spec.name = "lazyxla::graph";
  spec.operators = description.operators;
  spec.settings = record::record_settings();
  spec.portable = false;  // its number means something in this process's Python only
  spec.content = std::move(description.content);
  Arg list{.kind = Arg::Kind::kList};
  for (const Input& scalar : inputs_) {
    list.list.push_back({.kind = scalar ? Arg::Kind::kSlot : Arg::Kind::kOperand});
    if (scalar) spec.slots.push_back(*scalar);
  }
  spec.args = {Arg{.kind = Arg::Kind::kConstant, .constant = description.number}, std::move(list)};
  spec.outputs = std::move(description.outputs);
  spec.random = description.random;
  if (spec.random) {
    spec.slots.insert(spec.slots.end(), 2, {c10::ScalarType::Long, true, ir::SlotKind::kRandom});
  }
  spec.compile_options = std::move(description.options);
}

ir::SlotSpec TracedGraph::number(c10::ScalarType dtype, bool wrapped) {
  return {dtype, wrapped, c10::isFloatingType(dtype) ? ir::SlotKind::kFloat : ir::SlotKind::kInt};
}

uint64_t TracedGraph::id() const { return lifetime_->spec.id; }

std::vector<at::TensorBase> TracedGraph::record(c10::ArrayRef<c10::TensorImpl*> inputs) const {
  const ir::OpSpec& spec = lifetime_->current_spec();
  c10::SmallVector<ir::ScalarValue, 2> slots;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs_[i]) slots.push_back(slot_value(*inputs[i], *inputs_[i]));
  }
  ir::PendingSet& pending = record::pending_set(device_);
  settle_operands({inputs.data(), inputs.size()}, pending);
  std::optional<std::pair<uint64_t, uint64_t>> draw;
  if (spec.random) {
    draw = at::check_generator<Generator>(default_generator(device_))->draw();
    slots.push_back({.i = static_cast<int64_t>(draw->first)});
    slots.push_back({.i = static_cast<int64_t>(draw->second)});
  }
  std::vector<at::TensorBase> results;
  results.reserve(results_.size());
  for (const Result& result : results_) {
    const ir::Geometry& g = result.geometry;
    results.push_back(result.base < 0 ? make_tensor(g.dtype, g.sizes, g.strides, device_)
                                      : view(results[result.base], g));
  }
  {
    ir::Garbage garbage;
    c10::SmallVector<Value, 128> operands;
    std::lock_guard lock(ir::device_mutex(device_));
    prefetch(inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs_[i]) operands.push_back(read(*inputs[i], pending));
    }
    ir::NodePtr node = ir::Node::make(&spec, operands, slots, lifetime_);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results_[i].base >= 0) continue;
      write(*results[i].unsafeGetTensorImpl(), {node, results_[i].output}, pending, garbage);
    }
    for (const Write& w : writes_) write(*inputs[w.input], {node, w.output}, pending, garbage);
    if (draw) {
      pending.note_draw(default_generator(device_).getIntrusivePtr(), draw->first, draw->second);
    }
    ++pending.nodes_recorded;
  }
  ++Counters::get().nodes_recorded;
  return results;
}

void set_graph_dropped(std::function<void(int64_t)> dropped) { graph_dropped = std::move(dropped); }

}  // namespace lazyxla::dispatch
