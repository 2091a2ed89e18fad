#include "graph/run_pending.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include "common/counters.h"
#include "common/options.h"
#include "graph/execute.h"
#include "graph/one_operator.h"
#include "graph/runner.h"
#include "graph/tape.h"
#include "graph/walk.h"
#include "program/workers.h"

namespace lazyxla::graph {
namespace {

// Reuses the memory of the thread's last graph: an allocation above a KiB makes malloc consolidate
// all that was freed before.
class ReusedGraph {
 public:
  ReusedGraph() : graph(std::move(spare_)) {}
  ~ReusedGraph() {
    graph.clear();
    if (graph.key.capacity() <= kMostWords) spare_ = std::move(graph);
  }
  ReusedGraph(const ReusedGraph&) = delete;
  ReusedGraph& operator=(const ReusedGraph&) = delete;

  program::Graph graph;

 private:
  static constexpr size_t kMostWords = size_t{1} << 17;
  static thread_local program::Graph spare_;
};
thread_local program::Graph ReusedGraph::spare_;

// What a graph's program takes.
void list_inputs(const program::Graph& graph, c10::SmallVectorImpl<program::BufferRef>& inputs) {
  for (const ir::NodePtr& leaf : graph.leaves) inputs.push_back(program::buffer_ref(*leaf.get()));
}

// What the storages had before the graph, where they had something. Taken out of the graph.
std::vector<Replaced> replaced_by(program::Graph& graph) {
  std::vector<Replaced> replaced;
  for (program::Taken& taken : graph.taken) {
    if (!taken.committed) continue;
    replaced.push_back({taken.id, std::move(taken.committed), graph.promises[taken.output]});
  }
  return replaced;
}

// Whether they had something.
bool replaces(const program::Graph& graph) {
  return std::any_of(graph.taken.begin(), graph.taken.end(),
                     [](const program::Taken& taken) { return bool{taken.committed}; });
}

// Per value of the graph, whether it depends on node `failed`.
std::vector<bool> dependents(const program::Graph& graph, size_t failed) {
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

// Makes those storages pending again that still hold their promises and do not depend on node
// `failed`.
void make_pending_again(ir::PendingSet& pending, program::Graph& graph, size_t failed) {
  const std::vector<bool> tainted = dependents(graph, failed);
  ir::Garbage garbage;
  std::lock_guard lock(ir::device_mutex(pending.device));
  const auto alive = ir::Storage::alive();
  for (program::Taken& taken : graph.taken) {
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

// Makes all that a graph took pending again.
void make_pending_again(ir::PendingSet& pending, program::Graph& graph) {
  make_pending_again(pending, graph, graph.nodes.size());
}

// A graph whose program is not known yet, and how its program is made.
//
// Making is done by a worker thread while the flush waits. If it fails, the flush is undone
// (undo.h); if the wait is interrupted, the run is left to the runner (runner.h), for which the
// graph outlives the flush.
struct Missed {
  explicit Missed(program::Graph&& missed) : graph(std::move(missed)) {
    list_inputs(graph, inputs);
  }
  Run run(std::vector<Replaced>& replaced) const {
    return {inputs, graph.donated, graph.slots, graph.promises, replaced, graph.draws};
  }
  program::Graph graph;
  c10::SmallVector<program::BufferRef, 0> inputs;
};

std::shared_ptr<const program::Outcome<program::VariantRef>> start_making(
    const std::shared_ptr<program::Program>& program, const std::shared_ptr<Missed>& missed,
    program::Compile how, const program::Origin& origin) {
  return program::start_on_worker<program::VariantRef>(
      [=] { return program->variant(missed->graph, how, origin); });
}

// Has the program made, and waits for it. If that fails and `undone` says that the flush has
// something to undo, the graph is undone; else what does not depend on an operator that cannot be
// lowered is pending again.
program::VariantRef make_program(ir::PendingSet& pending,
                                 const std::shared_ptr<program::Program>& program,
                                 const std::shared_ptr<Missed>& missed, program::Compile how,
                                 c10::function_ref<program::Origin()> origin, ExecutionSlot& slot,
                                 bool undone) {
  program::Graph& graph = missed->graph;
  std::shared_ptr<const program::Outcome<program::VariantRef>> made;
  try {
    made = start_making(program, missed, how, origin());
    made->wait();
  } catch (const std::exception&) {
    std::vector<Replaced> replaced = replaced_by(graph);
    const Run run = missed->run(replaced);
    if (!made) {  // there is no origin, or no thread
      keeping(run, pending.device, [] { throw; });
    }
    slot.run_when_found([missed, made] { return made->get(); }, run);
    throw;
  }
  const auto undo_and = [&](c10::function_ref<void()> report) {
    std::vector<Replaced> replaced = replaced_by(graph);
    keeping(missed->run(replaced), pending.device, report);
  };
  try {
    return made->get();
  } catch (const program::LoweringFailure& e) {
    if (!undone) make_pending_again(pending, graph, e.node);
    undo_and([&] { TORCH_CHECK_NOT_IMPLEMENTED(false, e.what()); });
  } catch (const program::TooManyPrograms& e) {
    make_pending_again(pending, graph);
    undo_and([&] { TORCH_CHECK(false, e.what()); });
  } catch (const std::exception&) {
    undo_and([] { throw; });
  }
  TORCH_INTERNAL_ASSERT(false);  // each of them has thrown
}

// The parts of a graph that was split (walk.h's split): a program each.
//
// None runs before all are made: if making one fails, all of the graph is undone. A part that fails
// while it runs undoes itself; what the others computed is kept.
class Parts {
 public:
  // One slot for each graph.
  Parts(ir::PendingSet& pending, std::vector<program::Graph> graphs,
        std::vector<ExecutionSlot> slots);

  // No part is cut, nor left to the host, even if the origin allows it.
  void make(c10::function_ref<program::Origin()> origin);

  // Runs all, even if some fail; throws the first failure.
  void run();

 private:
  struct Part {
    ExecutionSlot slot;
    std::shared_ptr<program::Program> program;
    std::shared_ptr<Missed> missed;
    program::VariantRef variant;
    bool over = false;  // run, or undone
  };

  static std::vector<Replaced> let_go(Part& part);
  void leave_others(const Part& left);
  void end_others(const Part& failed, const std::exception_ptr& reason);

  ir::PendingSet& pending_;
  program::Origin origin_;  // known once a part has to be made
  std::vector<Part> parts_;
  std::vector<ir::Draws> draws_;  // of all parts together
  bool replaces_ = false;         // storages had something before
};

Parts::Parts(ir::PendingSet& pending, std::vector<program::Graph> graphs,
             std::vector<ExecutionSlot> slots)
    : pending_(pending), draws_(std::move(graphs[0].draws)) {
  for (size_t i = 0; i < graphs.size(); ++i) {
    replaces_ = replaces_ || replaces(graphs[i]);
    auto program = program::find_program(graphs[i]);
    parts_.push_back({std::move(slots[i]), std::move(program),
                      std::make_shared<Missed>(std::move(graphs[i])), nullptr});
  }
}

void Parts::make(c10::function_ref<program::Origin()> origin) {
  const auto own_origin = [&] {
    const program::Origin whole = origin();
    return origin_ = {.line = whole.line, .admit = whole.admit};
  };
  for (Part& part : parts_) {
    std::vector<ir::Draws>& draws = part.missed->graph.draws;
    try {
      part.variant = part.program->find(part.missed->graph);
      if (part.variant) continue;
      draws.swap(draws_);  // returned if this part cannot be made
      part.variant = make_program(pending_, part.program, part.missed, program::Compile::kNow,
                                  own_origin, part.slot, replaces_);
      draws.swap(draws_);
    } catch (const c10::NotImplementedError&) {  // an operator cannot be lowered
      end_others(part, replaces_ ? std::current_exception() : nullptr);
      throw;
    } catch (const std::exception&) {
      if (part.slot.is_used()) {
        leave_others(part);  // interrupted
      } else {
        end_others(part, std::current_exception());
      }
      throw;
    }
  }
}

void Parts::run() {
  std::exception_ptr failure;
  bool any_ran = false;
  for (Part& part : parts_) {
    ExecutionSlot slot = std::move(part.slot);  // ends with the run
    try {
      std::vector<Replaced> replaced = let_go(part);
      slot.run_now(part.variant, part.missed->run(replaced));
      any_ran = true;
    } catch (const std::exception&) {
      if (!failure) failure = std::current_exception();
      if (!slot.is_used()) continue;
      leave_others(part);
      any_ran = true;
      break;
    }
  }
  if (!failure) return;
  if (!any_ran) rewind(draws_);
  std::rethrow_exception(failure);
}

// What the storages had before. What only the graph keeps alive is dropped, so that its memory can
// be donated.
std::vector<Replaced> Parts::let_go(Part& part) {
  part.over = true;
  std::vector<Replaced> replaced = replaced_by(part.missed->graph);
  part.missed->graph.taken.clear();
  return replaced;
}

void Parts::leave_others(const Part& left) {
  for (Part& part : parts_) {
    if (&part == &left || part.over) continue;
    std::vector<Replaced> replaced = let_go(part);
    part.slot.run_when_found(
        [variant = part.variant, program = part.program, missed = part.missed, origin = origin_] {
          if (variant) return variant;
          return start_making(program, missed, program::Compile::kNow, origin)->get();
        },
        part.missed->run(replaced));
  }
}

// They fail for the same reason; without one they are pending again.
void Parts::end_others(const Part& failed, const std::exception_ptr& reason) {
  for (Part& part : parts_) {
    if (&part == &failed || part.over) continue;
    if (!reason) {
      make_pending_again(pending_, part.missed->graph);
      continue;
    }
    std::vector<Replaced> replaced = replaced_by(part.missed->graph);
    try {
      keeping(part.missed->run(replaced), pending_.device, [&] { std::rethrow_exception(reason); });
    } catch (const std::exception&) {
      // it is reported for the part that failed
    }
  }
}

thread_local std::optional<std::vector<uint64_t>> trace;

}  // namespace

void run_pending(ir::PendingSet& pending, const RunSettings& settings) {
  ReusedGraph reused;
  std::optional<ExecutionSlot> slot;
  if (!detach(pending, settings.options, reused.graph,
              [&] { slot = ExecutionSlot::take(pending.device); })) {
    return;
  }
  ++Counters::get().flushes;
  if (std::vector<program::Graph> graphs;
      settings.may_divide && !(graphs = split(reused.graph)).empty()) {
    for (const program::Graph& graph : graphs) {
      if (trace) trace->push_back(graph.hash);
    }
    std::vector<ExecutionSlot> execution_slots = std::move(*slot).divide(graphs.size());
    Parts parts(pending, std::move(graphs), std::move(execution_slots));
    parts.make(settings.origin);
    parts.run();
    return;
  }
  if (trace) trace->push_back(reused.graph.hash);
  const bool partitioned = reused.graph.partition != nullptr;
  // A flush for a result waits for its program; the modes that run operators by themselves do not.
  // How a program for many devices spreads its results must be known before they are read.
  const bool later = settings.nobody_waits && !options().blocking && !partitioned;
  const auto program = program::find_program(reused.graph);
  program::VariantRef variant = program->find(reused.graph);
  std::shared_ptr<Missed> missed;
  if (!variant) {
    missed = std::make_shared<Missed>(std::move(reused.graph));
    variant = make_program(pending, program, missed,
                           later ? program::Compile::kInBackground : program::Compile::kNow,
                           settings.origin, *slot, replaces(missed->graph));
  }
  program::Graph& graph = missed ? missed->graph : reused.graph;
  if (Tape* tape = Tape::current()) [[unlikely]]
    tape->take(graph, variant);
  std::vector<Replaced> replaced = replaced_by(graph);
  graph.taken.clear();  // dropping what it alone keeps alive lets memory be donated
  if (!variant->runs_on_host() && !partitioned) OneOperator::keep(graph, variant);
  c10::SmallVector<program::BufferRef, 128> inputs;
  list_inputs(graph, inputs);
  const Run run{inputs, graph.donated, graph.slots, graph.promises, replaced, graph.draws};
  if (later) {
    slot->run_soon(variant, run);
  } else {
    slot->run_now(variant, run);
  }
}

void trace_keys() { trace.emplace(); }

std::vector<uint64_t> traced_keys() {
  std::vector<uint64_t> keys = trace.value_or(std::vector<uint64_t>());
  trace.reset();
  return keys;
}

}  // namespace lazyxla::graph
