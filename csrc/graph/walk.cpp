#include "graph/walk.h"

#include <algorithm>
#include <atomic>

#include "common/locks.h"

namespace lazyxla::graph {
namespace {

class Walk {
 public:
  explicit Walk(program::Graph& graph) : graph_(graph) { begin(); }

  // Forgets all nodes seen.
  void begin() {
    static std::atomic<uint64_t> epoch{0};
    number_ = ++epoch;
  }
  uint64_t number() const { return number_; }
  bool seen(const ir::Node* node) const { return node->visit == number_; }

  // Numbers everything that `root` depends on, operands first, without recursion.
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

 private:
  void add(ir::Node* node) {
    node->visit = number_;
    node->edges = 0;
    node->retain();
    if (node->is_leaf()) {
      node->number = graph_.add_leaf(ir::NodePtr::adopt(node));
      return;
    }
    node->number = graph_.add_node(ir::NodePtr::adopt(node));
    for (const ir::Value& operand : node->operands()) {
      graph_.add_operand(operand.node->number, operand.index, operand.node->is_leaf());
    }
  }

  struct Frame {
    ir::Node* node;
    size_t next;
  };
  program::Graph& graph_;
  uint64_t number_;
  c10::SmallVector<Frame, 64> stack_;
};

// Which leaf may give its memory to which output: the old content of a storage to its new one.
void find_aliases(const Walk& walk, program::Graph& graph) {
  graph.aliases.assign(graph.leaves.size(), -1);
  std::vector<bool> taken(graph.outputs.size(), false);
  for (const program::Taken& t : graph.taken) {
    const ir::Node* old = t.committed.value.node.get();
    if (!old || !walk.seen(old)) continue;
    ++old->edges;  // what is kept to undo the flush prevents no donation
    if (graph.aliases[old->number] >= 0 || taken[t.output]) continue;
    const ir::TensorType& type = old->output_type(0);
    if (type.numel() == 0 || !(type == graph.output_types[t.output])) continue;
    graph.aliases[old->number] = static_cast<int>(t.output);
    taken[t.output] = true;
  }
}

// Other pending work may hold a node of this graph, and will read the leaves that it depends on:
// these get no edges, so that they count as held.
void keep_what_others_read(program::Graph& graph) {
  for (const program::Taken& t : graph.taken) ++t.value.node->edges;
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    const ir::Node& node = *graph.nodes[i].get();
    if (node.use_count() == node.edges + 1) continue;
    for (const ir::Value& operand : node.operands()) operand.node->edges = 0;
  }
}

// Finds the leaves that have no other reference.
void find_donated(program::Graph& graph) {
  keep_what_others_read(graph);
  for (size_t i = 0; i < graph.leaves.size(); ++i) {
    const ir::Node& leaf = *graph.leaves[i].get();
    // The graph's own list holds one reference; all others must be edges of this graph.
    if (graph.aliases[i] >= 0 && program::dies_with(leaf, leaf.edges + 1)) {
      graph.donated.push_back(static_cast<int>(i));
    }
  }
}

// Takes the storages, each value once; or once for each way in which it is to be spread. Each
// storage gets a leaf of its own.
void take_storages(ir::PendingSet& pending, const Walk& walk, program::Graph& graph) {
  std::vector<int> outputs;  // of the nodes met, one after the other; -1: not promised yet
  std::vector<const ir::Sharding*> spread;  // by output
  std::vector<int> next;                    // by output: another one of the same value; -1: none
  while (ir::Storage* s = pending.first) {
    const ir::Value& value = s->value();
    const ir::Node& node = *value.node.get();
    if (!walk.seen(&node)) {
      node.visit = walk.number();
      node.number = outputs.size();
      outputs.resize(outputs.size() + node.spec()->outputs.size(), -1);
    }
    const ir::Sharding* sharding = s->sharding();
    int& first = outputs[node.number + value.index];
    int output = first;
    while (output >= 0 && sharding && spread[output] && spread[output] != sharding) {
      output = next[output];
    }
    if (output < 0) {
      output = static_cast<int>(graph.promises.size());
      spread.push_back(nullptr);
      next.push_back(std::exchange(first, output));
      graph.output_types.push_back(value.type());
      graph.promises.push_back(program::make_buffer());
      if (ir::Mesh::any())
        graph.promises.back()->promise_sharding(program::DeviceBuffer::unknown());
    }
    if (sharding) spread[output] = sharding;
    ir::Content committed;
    ir::Value leaf{ir::Node::make_leaf(value.type(), graph.promises[output]), 0};
    ir::Value recorded = s->exchange_pending(std::move(leaf), committed);
    graph.taken.push_back({s->id(), std::move(recorded), std::move(committed),
                           static_cast<uint32_t>(output), sharding});
  }
  graph.draws.swap(pending.draws);
  pending.reads_data = false;
  ++pending.flushes;
  pending.nodes_recorded = 0;
  pending.has_collectives = false;
  pending.newest_model_state = 0;
  if (pending.new_model_flushes > 0) --pending.new_model_flushes;
  pending.initialized_again.clear();
  pending.fused = false;
}

// Numbers the nodes that the taken storages depend on. If the sharding of a leaf is not known yet
// it stops, and returns that leaf's buffer.
program::BufferRef number(Walk& walk, program::Graph& graph, uint64_t setting) {
  graph.key.push_back(setting);
  walk.begin();
  for (const program::Taken& t : graph.taken) walk.visit(t.value.node.get());
  graph.number_values();
  graph.outputs.resize(graph.promises.size());
  for (const program::Taken& t : graph.taken) {
    graph.outputs[t.output] = graph.values[t.value.node->number] + t.value.index;
  }
  find_aliases(walk, graph);
  if (ir::Mesh::any()) {
    if (program::BufferRef unknown = program::unknown_leaf(graph)) return unknown;
    program::find_partition(graph);
  }
  find_donated(graph);
  graph.complete_key();
  return nullptr;
}

// The walk leaves its marks in the nodes, which other graphs may share.
constinit OrderedMutex walks;

// Per node, the first one of those that it is connected with.
std::vector<uint32_t> components(const program::Graph& graph) {
  std::vector<uint32_t> first(graph.nodes.size());
  const auto root = [&](uint32_t node) {
    while (first[node] != node) node = first[node] = first[first[node]];
    return node;
  };
  std::vector<uint32_t> node_of;  // per value that is no leaf
  for (uint32_t i = 0; i < graph.nodes.size(); ++i) {
    first[i] = i;
    for (size_t j = 0; j < graph.nodes[i]->operands().size(); ++j) {
      const uint32_t operand = graph.operand(i, j);
      if (operand < graph.leaves.size()) continue;
      const uint32_t a = root(i), b = root(node_of[operand - graph.leaves.size()]);
      first[std::max(a, b)] = std::min(a, b);
    }
    node_of.insert(node_of.end(), graph.nodes[i]->spec()->outputs.size(), i);
  }
  for (uint32_t i = 0; i < first.size(); ++i) first[i] = root(i);
  return first;
}

// Per component, the part that it is in: as many of them as make kPartOutputs, in their order.
std::vector<uint32_t> parts_by_size(const std::vector<uint32_t>& roots, size_t nodes) {
  std::vector<uint32_t> results(nodes, 0), part_of(nodes, 0);
  for (const uint32_t root : roots) ++results[root];
  uint32_t parts = 0, full = kPartOutputs;
  std::vector<bool> placed(nodes, false);
  for (const uint32_t root : roots) {
    if (placed[root]) continue;
    placed[root] = true;
    if (full >= kPartOutputs) {
      ++parts;
      full = 0;
    }
    part_of[root] = parts - 1;
    full += results[root];
  }
  return part_of;
}

// The same with a part for each mesh, and one for what has none. Empty if a component has two.
std::vector<uint32_t> parts_by_mesh(const program::Graph& graph,
                                    const std::vector<uint32_t>& component,
                                    const std::vector<uint32_t>& roots) {
  std::vector<const ir::Mesh*> mesh_of(graph.nodes.size(), nullptr);
  bool has_two = false;
  const auto note = [&](uint32_t root, const ir::Mesh* mesh) {
    if (!mesh) return;
    has_two = has_two || (mesh_of[root] && mesh_of[root] != mesh);
    mesh_of[root] = mesh;
  };
  const auto declared = [](const ir::Sharding* sharding) {
    return sharding ? &sharding->mesh() : nullptr;
  };
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    note(component[i], declared(graph.nodes[i]->spec()->sharding));
    for (size_t j = 0; j < graph.nodes[i]->operands().size(); ++j) {
      const uint32_t operand = graph.operand(i, j);
      if (operand >= graph.leaves.size()) continue;
      note(component[i],
           program::needed_mesh(*graph.nodes[i]->spec(), *graph.leaves[operand].get()));
    }
  }
  for (const program::Taken& taken : graph.taken)
    note(roots[taken.output], declared(taken.sharding));
  if (has_two) return {};
  std::vector<const ir::Mesh*> meshes;  // by part
  std::vector<uint32_t> part_of(graph.nodes.size(), 0);
  for (const uint32_t root : roots) {
    auto found = std::find(meshes.begin(), meshes.end(), mesh_of[root]);
    if (found == meshes.end()) found = meshes.insert(found, mesh_of[root]);
    part_of[root] = static_cast<uint32_t>(found - meshes.begin());
  }
  return part_of;
}

}  // namespace

bool detach(ir::PendingSet& pending, uint64_t setting, program::Graph& graph,
            c10::function_ref<void()> detached) {
  std::unique_lock lock_walks(walks);
  Walk walk(graph);
  {
    std::lock_guard lock(ir::device_mutex(pending.device));
    if (!pending.first) return false;
    take_storages(pending, walk, graph);
    detached();
  }
  while (program::BufferRef unknown = number(walk, graph, setting)) {
    lock_walks.unlock();  // making it known may require numbering a graph first
    unknown->await_sharding();
    graph.clear_numbers();
    lock_walks.lock();
  }
  return true;
}

std::vector<program::Graph> split(program::Graph& graph) {
  // With several meshes, what is not spread is for none of them by being computed beside it.
  const bool by_mesh =
      graph.partition && (ir::Mesh::several() || graph.partition->spans_processes());
  if (!by_mesh && (graph.partition || graph.promises.size() <= kManyOutputs)) return {};
  std::lock_guard lock_walks(walks);
  const std::vector<uint32_t> component = components(graph);
  std::vector<uint32_t> roots;  // per output, its component
  for (const uint32_t output : graph.outputs) {
    const auto after = std::upper_bound(graph.values.begin(), graph.values.end(), output);
    roots.push_back(component[after - graph.values.begin() - 1]);
  }
  const std::vector<uint32_t> part_of =
      by_mesh ? parts_by_mesh(graph, component, roots) : parts_by_size(roots, graph.nodes.size());
  if (part_of.empty()) return {};
  const uint32_t parts = *std::max_element(part_of.begin(), part_of.end()) + 1;
  if (parts == 1) return {};
  std::vector<program::Graph> made(parts);
  std::vector<int> position(graph.outputs.size(), -1);  // in its part's outputs
  for (program::Taken& taken : graph.taken) {
    const uint32_t output = taken.output;
    program::Graph& part = made[part_of[roots[output]]];
    if (position[output] < 0) {
      position[output] = static_cast<int>(part.promises.size());
      part.promises.push_back(graph.promises[output]);
      part.output_types.push_back(graph.output_types[output]);
    }
    taken.output = static_cast<uint32_t>(position[output]);
    part.taken.push_back(std::move(taken));
  }
  made[0].draws.swap(graph.draws);
  const uint64_t setting = graph.key[0];
  graph.clear();  // a reference of its own would prevent donation
  for (program::Graph& part : made) {
    Walk walk(part);
    number(walk, part, setting);
  }
  return made;
}

}  // namespace lazyxla::graph
