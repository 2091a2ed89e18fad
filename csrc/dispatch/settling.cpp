#include "dispatch/settling.h"

#include <ATen/core/TensorBase.h>
#include <ATen/core/VariableHooksInterface.h>
#include <c10/core/GradMode.h>
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

// Between two writes of initialisation; a model that is only used is so told from one in the
// making.
constexpr int8_t kMostFlushes = 16;

// Runs, in a program of its own, what an optimizer recorded for tensors that it is about to update:
// it may have made them before its first step.
void settle_optimizer_state(const Scan& scan) {
  for (const c10::TensorImpl* tensor : scan.written) {
    ir::Storage& storage = storage_of(*tensor);
    const auto is_new = [&storage] {
      const ir::Node* node = storage.is_pending() ? storage.value().node.get() : nullptr;
      if (!node || !node->operands().empty()) return false;
      return !node->spec()->random && !record::is_temporary(*node->spec());
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

// Whether it is a view of a tensor in which autograd collects gradients.
bool is_view_of_parameter(const c10::TensorImpl& impl) {
  const at::TensorBase tensor = tensor_of(impl);
  const auto* hooks = at::impl::GetVariableHooks();
  if (!hooks->is_view(tensor)) return false;
  const at::TensorBase& base = hooks->base(tensor);
  return base.requires_grad() && hooks->is_leaf(base);
}

// Whether autograd collects gradients in the tensor, or in what it is a view of.
bool is_parameter(const c10::TensorImpl& impl) {
  if (!impl.requires_grad()) return false;
  return at::impl::GetVariableHooks()->is_leaf(tensor_of(impl)) || is_view_of_parameter(impl);
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

 private:
  static constexpr uint8_t kUnknownModel = kModel | 4;

  ska::flat_hash_map<const ir::Node*, uint8_t> known_;
};

// The storages of the model, whose newest part has this id, those computed from it alone, and those
// initialized again. Caller holds the mutex.
std::vector<ir::Storage*> model_storages(const ir::PendingSet& pending, uint64_t newest) {
  Origins origins;
  const auto& again = pending.initialized_again;
  const auto is_again = [&again](const ir::Storage& storage) {
    return std::find(again.begin(), again.end(), storage.id()) != again.end();
  };
  for (const ir::Storage* s = pending.first; s; s = s->next_pending()) {
    if (s->id() <= newest) origins.is_model(*s->value().node.get());
  }
  std::vector<ir::Storage*> found;
  for (ir::Storage* s = pending.first; s; s = s->next_pending()) {
    const bool is_of_model = origins.of(*s->value().node.get()) == Origins::kModel;
    if (is_of_model || is_again(*s)) found.push_back(s);
  }
  return found;
}

// The random operators that the storages' contents are computed from.
std::vector<const ir::Node*> random_operators(c10::ArrayRef<ir::Storage*> storages) {
  std::vector<const ir::Node*> found, left;
  ska::flat_hash_set<const ir::Node*> met;
  for (const ir::Storage* storage : storages) left.push_back(storage->value().node.get());
  while (!left.empty()) {
    const ir::Node* node = left.back();
    left.pop_back();
    if (node->is_leaf() || !met.insert(node).second) continue;
    if (node->spec()->random) found.push_back(node);
    for (const ir::Value& operand : node->operands()) left.push_back(operand.node.get());
  }
  return found;
}

// One past the last ordinal that operators drew with this seed; 0 if they drew none.
uint64_t end_of_draws(c10::ArrayRef<const ir::Node*> operators, uint64_t seed) {
  uint64_t end = 0;
  for (const ir::Node* node : operators) {
    const auto slots = node->slots();
    if (static_cast<uint64_t>(slots[slots.size() - 2].i) != seed) continue;
    end = std::max(end, static_cast<uint64_t>(slots.back().i) + 1);
  }
  return end;
}

// The draws of the model's operators move with them, so that a step that fails rewinds only its own
// draws.
void hand_over_draws(c10::ArrayRef<const ir::Node*> operators, ir::PendingSet& from,
                     ir::PendingSet& to) {
  std::vector<ir::Draws> kept;
  for (ir::Draws& draws : from.draws) {
    const uint64_t end = std::clamp(end_of_draws(operators, draws.seed), draws.first, draws.next);
    if (end > draws.first) to.draws.push_back({draws.generator, draws.seed, draws.first, end});
    if (end < draws.next) kept.push_back({draws.generator, draws.seed, end, draws.next});
  }
  from.draws = std::move(kept);
}

void settle_model(ir::PendingSet& pending) {
  if (c10::GradMode::is_enabled()) pending.new_model_flushes = 0;  // else initialisation may read
  const uint64_t newest = pending.newest_model_state.exchange(0);
  {
    std::lock_guard lock(ir::device_mutex(pending.device));
    if (newest == 0 && pending.initialized_again.empty()) return;  // another flush took it
  }
  record::run_apart(pending.device, [&](ir::PendingSet& apart, ir::Garbage&) {
    if (pending.has_collectives) return apart.adopt_all(pending);
    const std::vector<ir::Storage*> storages = model_storages(pending, newest);
    hand_over_draws(random_operators(storages), pending, apart);
    for (ir::Storage* storage : storages) apart.adopt(*storage);
    pending.initialized_again.clear();
  });
}

}  // namespace

void note_model_state(const c10::TensorImpl& tensor) {
  const ir::Storage& storage = storage_of(tensor);
  ir::PendingSet& pending = record::pending_set(tensor.device().index());
  std::lock_guard lock(storage.mutex());
  if (!storage.is_new()) {
    if (pending.new_model_flushes <= 0) return;
    pending.initialized_again.push_back(storage.id());
  } else if (storage.id() > pending.newest_model_state) {
    pending.newest_model_state = storage.id();
  }
  pending.new_model_flushes = kMostFlushes;
}

void settle_operands(c10::ArrayRef<const c10::TensorImpl*> operands, ir::PendingSet& pending) {
  if (pending.new_model_flushes <= 0 || record::current_mode() != record::Mode::kLazy) return;
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
    const bool is_initialized =
        is_parameter(*tensor) || (pending.new_model_flushes > 0 && is_view_of_parameter(*tensor));
    if (is_initialized) note_model_state(*tensor);
  }
}

}  // namespace lazyxla::dispatch
