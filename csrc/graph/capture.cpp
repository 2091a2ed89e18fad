#include "graph/capture.h"

#include <c10/util/Exception.h>

#include "pjrt/runtime.h"

namespace lazyxla::graph {
namespace {

struct Current {
  std::mutex mutex;
  std::shared_ptr<Capture> capture;

  static Current& get() {
    static auto* instance = new Current();
    return *instance;
  }
};

}  // namespace

std::shared_ptr<Capture> Capture::find_current() {
  Current& current = Current::get();
  std::lock_guard lock(current.mutex);
  return current.capture;
}

void Capture::begin(std::shared_ptr<Capture> capture) {
  Current& current = Current::get();
  std::lock_guard lock(current.mutex);
  TORCH_CHECK(!current.capture,
              "lazyxla.aot: a capture is active already; there can be one at a time");
  current.capture = std::move(capture);
  active_.store(true, std::memory_order_release);
}

void Capture::end() {
  std::shared_ptr<Capture> over;
  {
    Current& current = Current::get();
    std::lock_guard lock(current.mutex);
    active_.store(false, std::memory_order_release);
    over.swap(current.capture);
  }
  if (over) over->give_back_data();
}

void Capture::keep_data(ir::Storage& storage) {
  const ir::Value& value = storage.value();
  if (!value || !value.node->is_leaf() || buffer_of(*value.node.get()).is_abstract()) return;
  const auto capture = find_current();
  if (!capture) return;
  BufferRef buffer = buffer_ref(*value.node.get());
  ++buffer->waiting_runs;  // so that it can be donated as if it were not kept
  std::lock_guard lock(capture->mutex_);
  capture->kept_.push_back({&storage, storage.id(), &storage.pending_set(), storage.base(),
                            value.type(), std::move(buffer)});
}

void Capture::give_back_data() {
  std::vector<Kept> kept;
  {
    std::lock_guard lock(mutex_);
    kept.swap(kept_);
  }
  for (Kept& each : kept) {
    --each.buffer->waiting_runs;
    ir::Value leaf{ir::Node::make_leaf(each.type, each.buffer), 0};
    ir::Garbage garbage;
    std::lock_guard lock(each.pending->mutex);
    ir::Storage* storage = ir::Storage::find(each.storage, each.id);
    if (storage) garbage.add(storage->set_value(std::move(leaf), each.base));
  }
}

bool Capture::Program::serves(const Graph& graph) const {
  if (key != graph.key) return false;
  for (size_t i = 0; i < graph.slots.size(); ++i) {
    if (constants[i].i != graph.slots[i].i && !variable[i]) return false;
  }
  return true;
}

void Capture::take(const Graph& graph) {
  for (const auto& promise : graph.promises) promise->make_abstract();
  std::vector<bool> variable;
  size_t number = 0;
  bool is_new = true;
  {
    std::lock_guard lock(mutex_);
    const Program* like = nullptr;  // the last one for this key
    for (size_t i = programs_.size(); i-- > 0 && is_new;) {
      if (!like && programs_[i].key == graph.key) like = &programs_[i];
      if (!programs_[i].serves(graph)) continue;
      number = i;
      is_new = false;
    }
    if (is_new) {
      number = programs_.size();
      variable = history_.variable_slots(graph, like ? &like->variable : nullptr,
                                         like ? &like->constants : nullptr);
      programs_.push_back({graph.key, variable, graph.slots});
    }
  }
  listener_({graph, variable, number, is_new});
}

std::string recorded_platform() {
  const auto capture = Capture::current();
  return capture ? capture->platform() : pjrt::Runtime::get().platform();
}

}  // namespace lazyxla::graph
