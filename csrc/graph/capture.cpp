#include "graph/capture.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <sstream>

#include "graph/scope.h"
#include "pjrt/runtime.h"

namespace lazyxla::graph {
namespace {

struct Active {
  std::atomic<bool> any{false};  // most programs capture nothing
  std::mutex mutex;
  std::shared_ptr<Capture> capture;

  static Active& get() {
    static auto* instance = new Active();
    return *instance;
  }
};

// Gives storages that had data before, and would lose it to a value that nobody computes, their
// data back. Returns the type of one of them, or "".
std::string give_back_data(ir::PendingSet& pending, const Graph& graph) {
  std::ostringstream type;
  ir::Garbage garbage;
  std::lock_guard lock(pending.mutex);
  for (const ir::NodePtr& leaf : graph.leaves) {
    if (!leaf->home || buffer_of(*leaf.get()).is_abstract()) continue;
    for (const Taken& taken : graph.taken) {
      if (taken.storage != leaf->home) continue;
      ir::Storage* storage = ir::Storage::find(taken.storage, taken.id);
      if (!storage || !(graph.output_types[taken.output] == leaf->output_type(0))) continue;
      garbage.add(storage->set_value({leaf, 0}));
      type.str("");
      type << leaf->output_type(0).dtype << c10::IntArrayRef(leaf->output_type(0).dims);
    }
  }
  return type.str();
}

}  // namespace

std::shared_ptr<Capture> Capture::current() {
  Active& active = Active::get();
  if (!active.any.load(std::memory_order_acquire)) [[likely]]
    return nullptr;
  std::lock_guard lock(active.mutex);
  return active.capture;
}

void Capture::begin(std::shared_ptr<Capture> capture) {
  Active& active = Active::get();
  std::lock_guard lock(active.mutex);
  TORCH_CHECK(!active.capture,
              "lazyxla.aot: a capture is active already; there can be one at a time");
  active.capture = std::move(capture);
  active.any.store(true, std::memory_order_release);
}

void Capture::end() {
  Active& active = Active::get();
  std::shared_ptr<Capture> over;  // dies without the mutex
  std::lock_guard lock(active.mutex);
  active.any.store(false, std::memory_order_release);
  over.swap(active.capture);
}

bool Capture::Program::serves(const Graph& graph) const {
  if (key != graph.key) return false;
  for (size_t i = 0; i < graph.slots.size(); ++i) {
    if (constants[i].i != graph.slots[i].i && !variable[i]) return false;
  }
  return true;
}

void Capture::take(ir::PendingSet& pending, const Graph& graph) {
  for (const auto& promise : graph.promises) promise->make_abstract();
  const std::string type = give_back_data(pending, graph);
  TORCH_CHECK(type.empty(), "lazyxla.aot: ", user_line_prefix(), "a tensor that has data (", type,
              ") would be written to while a program is recorded without running it; it keeps its "
              "data. Make what a program writes to while it is recorded");
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
