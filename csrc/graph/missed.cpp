#include "graph/missed.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace lazyxla::graph {
namespace {

// Undoes replaced_by.
void give_back(Graph& graph, std::vector<Replaced>& replaced) {
  auto next = replaced.begin();
  for (Taken& taken : graph.taken) {
    if (next == replaced.end()) break;
    if (next->id == taken.id) taken.committed = std::move(next++->content);
  }
  replaced.clear();
}

// Per value of the graph, whether it depends on node `failed`.
std::vector<bool> dependents(const Graph& graph, size_t failed) {
  std::vector<bool> tainted(graph.leaves.size(), false);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    bool depends = i == failed;
    for (size_t j = 0; j < graph.nodes[i]->operands().size(); ++j) {
      depends = depends || tainted[graph.operand(i, j)];
    }
    tainted.insert(tainted.end(), graph.nodes[i]->spec()->outputs.size(), depends);
  }
  return tainted;
}

// Makes those storages pending again that hold what they were promised and do not depend on node
// `failed`.
void make_pending_again(ir::PendingSet& pending, Graph& graph, size_t failed) {
  const std::vector<bool> tainted = dependents(graph, failed);
  ir::Garbage garbage;
  std::lock_guard lock(ir::device_mutex(pending.device));
  const auto alive = ir::Storage::alive();
  for (Taken& taken : graph.taken) {
    const auto found = alive.find(taken.id);
    if (tainted[graph.outputs[taken.output]] || found == alive.end()) continue;
    ir::Storage& storage = *found->second;
    const bool is_held =
        storage.value() && storage.value().node->leaf_data() == graph.promises[taken.output];
    if (!is_held) continue;
    storage.make_pending(std::move(taken.value), std::move(taken.committed), pending, garbage);
  }
  pending.draws.insert(pending.draws.begin(), std::make_move_iterator(graph.draws.begin()),
                       std::make_move_iterator(graph.draws.end()));
  graph.draws.clear();
}

}  // namespace

void list_inputs(const Graph& graph, c10::SmallVectorImpl<BufferRef>& inputs) {
  for (const ir::NodePtr& leaf : graph.leaves) inputs.push_back(buffer_ref(*leaf.get()));
}

std::vector<Replaced> replaced_by(Graph& graph) {
  std::vector<Replaced> replaced;
  for (Taken& taken : graph.taken) {
    if (!taken.committed) continue;
    replaced.push_back({taken.id, std::move(taken.committed), graph.promises[taken.output]});
  }
  return replaced;
}

bool replaces(const Graph& graph) {
  return std::any_of(graph.taken.begin(), graph.taken.end(),
                     [](const Taken& taken) { return bool{taken.committed}; });
}

std::shared_ptr<const Outcome<VariantRef>> start_making(const std::shared_ptr<Program>& program,
                                                        const std::shared_ptr<Missed>& missed,
                                                        Compile how, const Origin& origin) {
  return start_on_worker<VariantRef>([=] { return program->variant(missed->graph, how, origin); });
}

VariantRef make_program(ir::PendingSet& pending, const std::shared_ptr<Program>& program,
                        const std::shared_ptr<Missed>& missed, Compile how, const Origin& origin,
                        ExecutionSlot& slot, bool undone) {
  Graph& graph = missed->graph;
  std::shared_ptr<const Outcome<VariantRef>> made;
  try {
    made = start_making(program, missed, how, origin);
    made->wait();
  } catch (const std::exception&) {
    std::vector<Replaced> replaced = replaced_by(graph);
    const Run run = missed->run(replaced);
    if (!made) {  // no thread could be started
      keeping(run, pending.device, [] { throw; });
    }
    slot.run_when_found([missed, made] { return made->get(); }, run);
    throw;
  }
  std::vector<Replaced> replaced = replaced_by(graph);
  const Run run = missed->run(replaced);
  VariantRef variant;
  keeping(run, pending.device, [&] {
    try {
      variant = made->get();
    } catch (const LoweringFailure& e) {
      if (!undone) make_pending_again(pending, graph, e.node);
      TORCH_CHECK_NOT_IMPLEMENTED(false, e.what());
    } catch (const TooManyPrograms& e) {
      give_back(graph, replaced);
      make_pending_again(pending, graph);
      TORCH_CHECK(false, e.what());
    }
  });
  give_back(graph, replaced);
  return variant;
}

void make_pending_again(ir::PendingSet& pending, Graph& graph) {
  make_pending_again(pending, graph, graph.nodes.size());
}

}  // namespace lazyxla::graph
