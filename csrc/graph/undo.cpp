#include "graph/undo.h"

#include "pjrt/buffer.h"

namespace lazyxla::graph {

void rewind(const std::vector<ir::Draws>& draws) {
  for (auto each = draws.rbegin(); each != draws.rend(); ++each) {
    c10::GeneratorImpl& generator = *each->generator;
    std::lock_guard lock(generator.mutex_);
    if (generator.current_seed() == each->seed && generator.get_offset() == each->next) {
      generator.set_offset(each->first);
    }
  }
}

std::vector<const void*> undo(c10::DeviceIndex device, std::vector<Replaced> replaced,
                              bool was_run) {
  std::vector<const void*> lost;
  ir::Garbage garbage;
  std::lock_guard lock(ir::device_mutex(device));
  const auto alive = ir::Storage::alive();
  for (Replaced& each : replaced) {
    const program::BufferRef promise = each.promise.lock();
    if (!promise) continue;  // no storage has what was not computed
    // A promise that was itself broken stands for the content before it.
    const ir::Content* content = &each.content;
    const ir::Geometry* base = content->base.get();
    while (const ir::Content* before =
               program::buffer_of(*content->value.node.get()).stands_for()) {
      content = before;
      if (before->base) base = before->base.get();
    }
    const bool usable = program::buffer_of(*content->value.node.get()).is_usable();
    auto found = alive.find(each.id);
    if (found != alive.end() && found->second->value() &&
        found->second->value().node->leaf_data() == promise) {
      if (usable) {
        found->second->restore(content->value, base, garbage);
      } else {
        lost.push_back(found->second->data());
      }
    }
    // What an earlier stage computed is as good as what was before.
    if (usable && (was_run || !promise->is_kept())) promise->stand_for(std::move(each.content));
  }
  return lost;
}

}  // namespace lazyxla::graph
