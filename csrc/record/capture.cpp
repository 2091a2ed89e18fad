#include "record/capture.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "common/gil.h"
#include "graph/transfer.h"
#include "pjrt/runtime.h"

namespace lazyxla::record {
namespace {

auto& active = *new Guarded<std::shared_ptr<Capture>>();

}  // namespace

std::shared_ptr<Capture> Capture::find_current() { return *active.hold(); }

void Capture::begin(std::shared_ptr<Capture> capture) {
  {
    const auto current = active.hold();
    if (!*current) {
      current->swap(capture);
      active_.store(true, std::memory_order_release);
      graph::set_data_abstract(true);
    }
  }
  TORCH_CHECK(!capture, "lazyxla.aot: a capture is active already; there can be one at a time");
}

void Capture::end() {
  std::shared_ptr<Capture> over;
  {
    const auto current = active.hold();
    graph::set_data_abstract(false);
    active_.store(false, std::memory_order_release);
    over.swap(*current);
  }
  if (over) over->give_back_data();
}

void Capture::keep_data(ir::Storage& storage) {
  const ir::Value& value = storage.value();
  if (!value || !value.node->is_leaf() || program::buffer_of(*value.node.get()).is_abstract())
    return;
  const auto capture = find_current();
  if (!capture) return;
  program::BufferRef buffer = program::buffer_ref(*value.node.get());
  ++buffer->waiting_runs;  // so that it can be donated as if it were not kept
  capture->kept_.hold()->push_back(
      {storage.id(), storage.device().index(), storage.base(), value.type(), std::move(buffer)});
}

void Capture::give_back_data() {
  std::vector<Kept> kept = std::exchange(*kept_.hold(), {});
  std::sort(kept.begin(), kept.end(),
            [](const Kept& a, const Kept& b) { return a.device < b.device; });
  for (size_t i = 0; i < kept.size();) {
    const c10::DeviceIndex device = kept[i].device;
    ir::Garbage garbage;
    std::lock_guard lock(ir::device_mutex(device));
    const auto alive = ir::Storage::alive();
    for (; i < kept.size() && kept[i].device == device; ++i) {
      --kept[i].buffer->waiting_runs;
      const auto found = alive.find(kept[i].id);
      if (found == alive.end()) continue;
      const ir::Value leaf{ir::Node::make_leaf(kept[i].type, kept[i].buffer), 0};
      found->second->restore(leaf, &kept[i].base, garbage);
    }
  }
}

bool Capture::Program::has_numbers_of(const program::Graph& graph) const {
  for (size_t i = 0; i < graph.slots.size(); ++i) {
    if (scalars.differs(i, graph.slots)) return false;
  }
  return true;
}

void Capture::take(const program::Graph& graph) {
  for (const auto& promise : graph.promises) promise->make_abstract();
  std::unique_lock lock(programs_mutex_, std::try_to_lock);
  if (!lock) {
    WithoutGil no_gil;  // the holder may be lowering
    lock.lock();
  }
  const auto found = find(graph);
  const size_t number = found ? *found : add(graph);
  listener_.take({graph, programs_[number].scalars.variable, number, !found});
}

std::optional<size_t> Capture::find(const program::Graph& graph) {
  for (size_t i = programs_.size(); i-- > 0;) {
    if (programs_[i].key != graph.key) continue;
    if (programs_[i].has_numbers_of(graph)) return i;
    learn_static_slots(i);
    if (programs_[i].scalars.serves(graph.slots)) return i;
  }
  return std::nullopt;
}

size_t Capture::add(const program::Graph& graph) {
  std::vector<const Program*> alike;  // the last one first
  for (size_t i = programs_.size(); i-- > 0;) {
    if (programs_[i].key == graph.key) alike.push_back(&programs_[i]);
  }
  program::ScalarPlan scalars{
      history_.variable_slots(graph, alike.empty() ? nullptr : &alike[0]->scalars), graph.slots};
  for (const Program* program : alike) scalars.fix(*program->static_slots);
  programs_.push_back({graph.key, std::move(scalars)});
  return programs_.size() - 1;
}

void Capture::learn_static_slots(size_t number) {
  Program& program = programs_[number];
  if (program.static_slots) return;
  program.static_slots = listener_.static_slots(number);
  // The slots after the graph's own hold numbers that are part of their OpSpec.
  std::erase_if(*program.static_slots,
                [&](uint32_t slot) { return slot >= program.scalars.variable.size(); });
  program.scalars.fix(*program.static_slots);
}

std::string recorded_platform() {
  const auto capture = Capture::current();
  return capture ? capture->platform() : pjrt::Runtime::get().platform();
}

}  // namespace lazyxla::record
