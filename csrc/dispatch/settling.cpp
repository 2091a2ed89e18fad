#include "dispatch/settling.h"

#include <ATen/core/TensorBase.h>
#include <ATen/core/VariableHooksInterface.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "dispatch/tensor.h"
#include "record/flush.h"
#include "record/recording.h"
#include "record/scope.h"
#include "record/settings.h"

namespace lazyxla::dispatch {
namespace {

// Runs, in a program of its own, what an optimizer recorded for tensors that it is about to update:
// it may have made them before its first step.
void settle_optimizer_state(const Scan& scan) {
  for (const c10::TensorImpl* tensor : scan.written) {
    ir::Storage& storage = storage_of(*tensor);
    const auto is_new = [&storage] {
      const ir::Node* node = storage.is_pending() ? storage.value().node.get() : nullptr;
      return node && node->operands().empty() && !node->spec()->random;
    };
    {
      std::lock_guard lock(storage.mutex());
      if (!is_new()) continue;
    }
    record::run_apart(scan.device, [&](ir::PendingSet& apart, ir::Garbage&) {
      if (is_new()) apart.adopt(storage);
    });
  }
}

// Whether autograd collects gradients in the tensor, or in what it is a view of.
bool is_parameter(const c10::TensorImpl& impl) {
  if (!impl.requires_grad()) return false;
  const at::TensorBase tensor(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(
      const_cast<c10::TensorImpl*>(&impl)));
  const auto* hooks = at::impl::GetVariableHooks();
  return hooks->is_leaf(tensor) || (hooks->is_view(tensor) && hooks->is_leaf(hooks->base(tensor)));
}

// Tracks what nodes are computed from.
class Origins {
 public:
  enum Origin : uint8_t { kData = 1, kModel = 2 };

  // Marks the node as the content of a part of the model. To be called before any query.
  void is_model(const ir::Node& node) { known_[&node] = kUnknownModel; }

  uint8_t of(const ir::Node& root) {
    std::vector<const ir::Node*> path{&root};
    while (!path.empty()) {
      const ir::Node* node = path.back();
      uint8_t& mine = known_[node];
      uint8_t origin = node->is_leaf() ? kData : mine & kModel;
      const ir::Node* unknown = nullptr;
      for (const ir::Value& operand : node->operands()) {
        const auto found = known_.find(operand.node.get());
        if (found == known_.end() || found->second == kUnknownModel) {
          unknown = operand.node.get();
          break;
        }
        origin |= found->second;
      }
      if (unknown) {
        path.push_back(unknown);
        continue;
      }
      known_[node] = origin;
      path.pop_back();
    }
    return known_[&root];
  }

  // One past the last ordinal that the model drew with this seed; 0 if it drew none.
  uint64_t end_of_draws(uint64_t seed) const {
    uint64_t end = 0;
    for (const auto& [node, origin] : known_) {
      if (origin != kModel || !node->spec()->random) continue;
      const auto slots = node->slots();
      if (static_cast<uint64_t>(slots[slots.size() - 2].i) != seed) continue;
      end = std::max(end, static_cast<uint64_t>(slots.back().i) + 1);
    }
    return end;
  }

 private:
  static constexpr uint8_t kUnknownModel = kModel | 4;

  ska::flat_hash_map<const ir::Node*, uint8_t> known_;
};

// The storages of the model, whose newest part has this id, and those computed from it alone.
// Caller holds the mutex.
std::vector<ir::Storage*> model_storages(const ir::PendingSet& pending, uint64_t newest,
                                         Origins& origins) {
  for (const ir::Storage* s = pending.first; s; s = s->next_pending()) {
    if (s->id() <= newest) origins.is_model(*s->value().node.get());
  }
  std::vector<ir::Storage*> found;
  for (ir::Storage* s = pending.first; s; s = s->next_pending()) {
    if (origins.of(*s->value().node.get()) == Origins::kModel) found.push_back(s);
  }
  return found;
}

// The draws of the model's operators move with them, so that a step that fails rewinds only its own
// draws.
void hand_over_draws(const Origins& origins, ir::PendingSet& from, ir::PendingSet& to) {
  std::vector<ir::Draws> kept;
  for (ir::Draws& draws : from.draws) {
    const uint64_t end = std::clamp(origins.end_of_draws(draws.seed), draws.first, draws.next);
    if (end > draws.first) to.draws.push_back({draws.generator, draws.seed, draws.first, end});
    if (end < draws.next) kept.push_back({draws.generator, draws.seed, end, draws.next});
  }
  from.draws = std::move(kept);
}

void settle_model(ir::PendingSet& pending) {
  const uint64_t newest = pending.newest_model_state.exchange(0);
  record::run_apart(pending.device, [&](ir::PendingSet& apart, ir::Garbage&) {
    if (pending.has_collectives) return apart.adopt_all(pending);
    Origins origins;
    for (ir::Storage* storage : model_storages(pending, newest, origins)) apart.adopt(*storage);
    hand_over_draws(origins, pending, apart);
  });
}

}  // namespace

void note_model_state(const c10::TensorImpl& tensor) {
  const ir::Storage& storage = storage_of(tensor);
  ir::PendingSet& pending = record::pending_set(tensor.device().index());
  if (storage.id() <= pending.newest_model_state) return;
  std::lock_guard lock(storage.mutex());
  if (storage.is_new()) pending.newest_model_state = storage.id();
}

void settle_operands(c10::ArrayRef<const c10::TensorImpl*> operands, ir::PendingSet& pending) {
  if (pending.newest_model_state == 0 || record::current_mode() != record::Mode::kLazy) return;
  if (record::in_region()) return;  // the region began with nothing pending
  if (std::any_of(operands.begin(), operands.end(),
                  [](const c10::TensorImpl* t) { return is_lazy(*t) && is_parameter(*t); })) {
    settle_model(pending);
  }
}

void settle(const Scan& scan) {
  if (record::in_optimizer_step()) {
    if (record::current_mode() != record::Mode::kEager) settle_optimizer_state(scan);
    return;
  }
  ir::PendingSet& pending = record::pending_set(scan.device);
  if (scan.written.empty()) return settle_operands(scan.operands, pending);
  for (const c10::TensorImpl* tensor : scan.written) {
    if (is_parameter(*tensor)) note_model_state(*tensor);  // initialised, if it is new
  }
}

}  // namespace lazyxla::dispatch
