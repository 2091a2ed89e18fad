#include "graph/walk.h"

#include <c10/util/flat_hash_map.h>

#include <atomic>

#include "ir/shape_memo.h"

namespace lazyxla::graph {
namespace {

// Marks of the key's sections; OpSpec ids are below them.
enum Mark : uint64_t { kLeaf = uint64_t{1} << 56, kOutputs = uint64_t{2} << 56 };

class Walk {
 public:
  explicit Walk(Graph& graph) : graph_(graph) {
    static std::atomic<uint64_t> epoch{0};
    visit_ = ++epoch;
  }

  // Numbers everything below `root`, operands first, without recursion.
  void visit(ir::Node* root) {
    if (seen(root)) return;
    stack_.push_back({root, 0});
    while (!stack_.empty()) {
      auto& [node, next] = stack_.back();
      if (next < node->operands().size()) {
        ir::Node* operand = node->operands()[next++].node.get();
        if (!seen(operand)) {
          stack_.push_back({operand, 0});
        } else {
          ++operand->edges;
        }
        continue;
      }
      ir::Node* done = node;
      stack_.pop_back();
      add(done);
      if (!stack_.empty()) ++done->edges;
    }
  }

  // A value as the key lists it: the position of its leaf or node, the output, and which of both.
  static uint64_t code(const ir::Value& value) {
    const ir::Node* node = value.node.get();
    return (uint64_t{node->number} << 17) | (uint64_t{value.index} << 1) | node->is_leaf();
  }

 private:
  bool seen(const ir::Node* node) const { return node->visit == visit_; }

  void add(ir::Node* node) {
    node->visit = visit_;
    node->edges = 0;
    node->retain();
    ir::NodePtr pointer = ir::NodePtr::adopt(node);
    if (node->is_leaf()) {
      node->number = graph_.leaves.size();
      graph_.leaves.push_back(std::move(pointer));
      const ir::TensorType& type = node->output_type(0);
      graph_.key.push_back(kLeaf | (static_cast<uint64_t>(type.dtype) << 32) | type.dims.size());
      graph_.key.insert(graph_.key.end(), type.dims.begin(), type.dims.end());
      return;
    }
    node->number = graph_.nodes.size();
    graph_.nodes.push_back(std::move(pointer));
    graph_.key.push_back(node->spec()->id);
    graph_.records.push_back(graph_.key.size());
    for (const ir::Value& operand : node->operands()) graph_.key.push_back(code(operand));
    graph_.slots.insert(graph_.slots.end(), node->slots().begin(), node->slots().end());
  }

  struct Frame {
    ir::Node* node;
    size_t next;
  };
  Graph& graph_;
  uint64_t visit_;
  c10::SmallVector<Frame, 64> stack_;
};

// Gives each leaf that dies with this run to an output of its type: to the new content of the
// storage that held it if that is one, else to the first free one.
void assign_donations(Graph& graph) {
  graph.donations.assign(graph.leaves.size(), -1);
  std::vector<bool> taken;
  std::vector<size_t> homeless;
  ska::flat_hash_map<uint64_t, int> output_of_storage;
  for (size_t i = 0; i < graph.leaves.size(); ++i) {
    const ir::Node& leaf = *graph.leaves[i].get();
    // The graph's own list holds one reference; all others must be edges of this graph.
    if (!dies_with(leaf, leaf.edges + 1)) continue;
    if (taken.empty()) {
      taken.resize(graph.outputs.size(), false);
      for (const Taken& t : graph.taken) output_of_storage.emplace(t.id, t.output);
    }
    auto home = output_of_storage.find(leaf.home);
    if (home == output_of_storage.end() || taken[home->second] ||
        !(graph.output_types[home->second] == leaf.output_type(0))) {
      homeless.push_back(i);
      continue;
    }
    taken[home->second] = true;
    graph.donations[i] = home->second;
  }
  for (size_t i : homeless) {
    const ir::TensorType& type = graph.leaves[i]->output_type(0);
    for (size_t j = 0; j < graph.outputs.size(); ++j) {
      if (taken[j] || !(graph.output_types[j] == type)) continue;
      taken[j] = true;
      graph.donations[i] = static_cast<int>(j);
      break;
    }
  }
}

// Turns (node, output) into the lowering's value numbers: leaves first, then the nodes' outputs.
// Returns how many there are.
uint32_t number_values(Graph& graph) {
  uint32_t next = graph.leaves.size();
  graph.values.reserve(graph.nodes.size());
  for (const ir::NodePtr& node : graph.nodes) {
    graph.values.push_back(next);
    next += node->spec()->outputs.size();
  }
  return next;
}

}  // namespace

uint32_t Graph::operand(size_t node, size_t position) const {
  uint64_t code = key[records[node] + position];
  auto number = static_cast<uint32_t>(code >> 17);
  return code & 1 ? number : values[number] + static_cast<uint32_t>(code >> 1 & 0xffff);
}

void Graph::clear() {
  leaves.clear();
  nodes.clear();
  values.clear();
  records.clear();
  outputs.clear();
  output_types.clear();
  promises.clear();
  taken.clear();
  donations.clear();
  slots.clear();
  key.clear();
}

void detach(ir::PendingSet& pending, uint64_t setting, Graph& graph) {
  graph.key.push_back(setting);
  Walk walk(graph);
  for (ir::Storage* s = pending.first; s; s = s->next_pending()) walk.visit(s->value().node.get());

  std::vector<int> output_of_value(number_values(graph), -1);
  std::vector<ir::Value> promised;
  graph.key.push_back(kOutputs);
  while (ir::Storage* s = pending.first) {
    const ir::Value& value = s->value();
    const uint32_t number = graph.values[value.node->number] + value.index;
    int& output = output_of_value[number];
    if (output < 0) {
      output = static_cast<int>(graph.outputs.size());
      graph.outputs.push_back(number);
      graph.output_types.push_back(value.type());
      auto promise = make_buffer();
      graph.promises.push_back(promise);
      promised.push_back({ir::Node::make_leaf(value.type(), std::move(promise)), 0});
      graph.key.push_back(Walk::code(value));
    }
    graph.taken.push_back(
        {s, s->id(), s->set_value(promised[output]), static_cast<uint32_t>(output)});
  }
  pending.nodes_recorded = 0;
  pending.fused = false;
  assign_donations(graph);
  for (int donation : graph.donations) graph.key.push_back(static_cast<uint64_t>(donation) + 1);
  graph.hash = ir::hash_words(graph.key.data(), graph.key.size());
}

void restore(ir::PendingSet& pending, Graph& graph, size_t failed) {
  std::vector<bool> tainted(graph.nodes.size(), false);
  for (size_t i = failed; i < graph.nodes.size(); ++i) {
    tainted[i] = i == failed;
    for (const ir::Value& operand : graph.nodes[i]->operands()) {
      if (!operand.node->is_leaf() && tainted[operand.node->number]) tainted[i] = true;
    }
  }
  ir::Garbage garbage;
  std::lock_guard lock(pending.mutex);
  for (Taken& taken : graph.taken) {
    if (tainted[taken.value.node->number]) continue;
    ir::Storage* storage = ir::Storage::find(taken.storage, taken.id);
    if (!storage || !storage->value()) continue;
    const ir::Node& now = *storage->value().node.get();
    bool written_since = !now.is_leaf() || now.leaf_data() != graph.promises[taken.output];
    if (!written_since) garbage.add(storage->set_value(std::move(taken.value)));
  }
}

}  // namespace lazyxla::graph
