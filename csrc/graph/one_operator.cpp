#include "graph/one_operator.h"

#include "common/counters.h"

namespace lazyxla::graph {
namespace {

// An operator beyond these limits (of a long list of tensors) takes the general path, whose cost
// does not matter then.
constexpr size_t kMaxOperands = 8, kMaxResults = 4;

// What makes the same operator another program; small numbers at fixed positions, to compare
// quickly.
struct Pattern {
  uint64_t setting = 0;
  uint8_t num_operands = 0, num_leaves = 0, num_results = 0;
  uint8_t leaf_of_operand[kMaxOperands] = {};
  int8_t alias_of[kMaxOperands] = {};  // per leaf: the result that may take its memory, or -1
  uint8_t output_of_result[kMaxResults] = {};
  bool operator==(const Pattern&) const = default;
};

class Programs final : public ir::OwnPrograms {
 public:
  static Programs* of(const ir::OpSpec& spec) {
    return static_cast<Programs*>(spec.own_programs.load(std::memory_order_acquire));
  }

  static Programs& made_for(const ir::OpSpec& spec) {
    if (Programs* programs = of(spec)) return *programs;
    auto fresh = std::make_unique<Programs>();
    ir::OwnPrograms* none = nullptr;
    if (spec.own_programs.compare_exchange_strong(none, fresh.get())) return *fresh.release();
    return static_cast<Programs&>(*none);
  }

  program::VariantRef find(const Pattern& pattern, c10::ArrayRef<ir::ScalarValue> slots) {
    c10::SmallVector<program::VariantRef, 4> others;  // perhaps the last references: freed unlocked
    const auto entries = entries_.hold();
    for (const Entry& entry : *entries) {
      if (!(entry.pattern == pattern)) continue;
      auto variant = entry.variant.lock();
      if (variant && variant->matches(slots)) return variant;
      others.push_back(std::move(variant));
    }
    return nullptr;
  }

  void add(const Pattern& pattern, const program::VariantRef& variant) {
    const auto entries = entries_.hold();
    for (const Entry& entry : *entries) {
      const bool is_same =
          !entry.variant.owner_before(variant) && !variant.owner_before(entry.variant);
      if (is_same) return;
    }
    if (entries->size() == kMaxEntries) entries->pop_back();
    entries->insert(entries->begin(), {pattern, variant});  // the newest is likeliest
  }

 private:
  static constexpr size_t kMaxEntries = 16;
  struct Entry {
    Pattern pattern;
    std::weak_ptr<const program::Variant>
        variant;  // the program cache owns them, and may drop them
  };
  Guarded<c10::SmallVector<Entry, 1>, SpinLock> entries_;
};

// Whether it may be a call for many devices.
bool is_spread(c10::ArrayRef<ir::Value> operands, c10::ArrayRef<OneOperator::Result> results) {
  return std::any_of(operands.begin(), operands.end(),
                     [](const ir::Value& value) {
                       return program::buffer_of(*value.node.get()).sharding() != nullptr;
                     }) ||
         std::any_of(results.begin(), results.end(), [](const OneOperator::Result& result) {
           return result.storage->sharding() != nullptr;
         });
}

}  // namespace

std::optional<OneOperator> OneOperator::prepare(const ir::OpSpec& spec, uint64_t setting,
                                                c10::ArrayRef<ir::Value> operands,
                                                c10::ArrayRef<ir::ScalarValue> slots,
                                                c10::ArrayRef<Result> results,
                                                std::vector<ir::Draws> draws,
                                                c10::DeviceIndex device, ir::Garbage& garbage) {
  Programs* programs = Programs::of(spec);
  if (!programs || operands.size() > kMaxOperands || results.size() > kMaxResults) return {};
  if (ir::Mesh::any() && is_spread(operands, results)) return {};
  Pattern pattern{.setting = setting,
                  .num_operands = static_cast<uint8_t>(operands.size()),
                  .num_results = static_cast<uint8_t>(results.size())};
  const ir::Node* leaves[kMaxOperands];
  size_t mentions[kMaxOperands] = {};
  for (size_t i = 0; i < operands.size(); ++i) {
    uint8_t leaf = 0;
    while (leaf < pattern.num_leaves && leaves[leaf] != operands[i].node.get()) ++leaf;
    if (leaf == pattern.num_leaves) leaves[pattern.num_leaves++] = operands[i].node.get();
    pattern.leaf_of_operand[i] = leaf;
    ++mentions[leaf];
  }
  std::fill_n(pattern.alias_of, pattern.num_leaves, int8_t{-1});
  for (size_t r = 0; r < results.size(); ++r) {
    pattern.output_of_result[r] = results[r].output;
    const ir::Node* old = results[r].storage->value().node.get();
    for (uint8_t leaf = 0; leaf < pattern.num_leaves && old; ++leaf) {
      const ir::TensorType& type = spec.outputs[results[r].output];
      if (leaves[leaf] != old || !(old->output_type(0) == type) || type.numel() == 0) continue;
      if (pattern.alias_of[leaf] < 0) pattern.alias_of[leaf] = static_cast<int8_t>(r);
    }
  }
  auto variant = programs->find(pattern, slots);
  if (!variant) return {};
  OneOperator call(ExecutionSlot::take(device));
  call.variant_ = std::move(variant);
  call.draws_ = std::move(draws);
  for (uint8_t leaf = 0; leaf < pattern.num_leaves; ++leaf) {
    // Only the storage and the operands refer to the old content: its memory is free for the new.
    if (pattern.alias_of[leaf] >= 0 && program::dies_with(*leaves[leaf], mentions[leaf] + 1)) {
      call.donated_.push_back(leaf);
    }
  }
  size_t next = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (pattern.leaf_of_operand[i] != next) continue;
    call.inputs_.push_back(program::buffer_ref(*operands[i].node.get()));
    ++next;
  }
  for (const Result& result : results) {
    auto promise = program::make_buffer();
    ir::Storage& storage = *result.storage;
    if (storage.value()) {
      call.replaced_.push_back({storage.id(), {storage.value(), nullptr}, promise});
    }
    storage.set_leaf({ir::Node::make_leaf(spec.outputs[result.output], promise), 0}, garbage);
    call.promises_.push_back(std::move(promise));
  }
  return call;
}

void OneOperator::run(c10::ArrayRef<ir::ScalarValue> slots) {
  Counters& counters = Counters::get();
  ++counters.flushes;
  ++counters.cache_hits;
  execution_slot_.run_soon(variant_, {inputs_, donated_, slots, promises_, replaced_, draws_});
}

void OneOperator::keep(const program::Graph& graph, const program::VariantRef& variant) {
  if (graph.nodes.size() != 1) return;
  const ir::Node& node = *graph.nodes[0].get();
  auto operands = node.operands();
  if (operands.size() > kMaxOperands || graph.outputs.size() > kMaxResults) return;
  Pattern pattern{.setting = graph.key[0],
                  .num_operands = static_cast<uint8_t>(operands.size()),
                  .num_leaves = static_cast<uint8_t>(graph.leaves.size()),
                  .num_results = static_cast<uint8_t>(graph.outputs.size())};
  for (size_t i = 0; i < operands.size(); ++i) {
    pattern.leaf_of_operand[i] = graph.operand(0, i);
  }
  std::copy(graph.aliases.begin(), graph.aliases.end(), pattern.alias_of);
  for (size_t r = 0; r < graph.outputs.size(); ++r) {
    pattern.output_of_result[r] = graph.outputs[r] - graph.values[0];
  }
  Programs::made_for(*node.spec()).add(pattern, variant);
}

}  // namespace lazyxla::graph
