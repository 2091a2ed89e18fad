// A graph whose program is not known yet, and how its program is made.
//
// Making is done by a worker thread while the flush waits. If it fails, the flush is undone
// (undo.h); if the wait is interrupted, the run is left to the runner (runner.h), for which the
// graph outlives the flush.
#pragma once

#include <memory>
#include <vector>

#include "graph/execute.h"
#include "graph/runner.h"
#include "graph/walk.h"
#include "program/program.h"
#include "program/workers.h"

namespace lazyxla::graph {

// What a graph's program takes.
void list_inputs(const Graph& graph, c10::SmallVectorImpl<BufferRef>& inputs);

// What the storages had before the graph, where they had something. Taken out of the graph.
std::vector<Replaced> replaced_by(Graph& graph);

// Whether they had something.
bool replaces(const Graph& graph);

struct Missed {
  explicit Missed(Graph&& missed) : graph(std::move(missed)) { list_inputs(graph, inputs); }
  Run run(std::vector<Replaced>& replaced) const {
    return {inputs, graph.donated, graph.slots, graph.promises, replaced, graph.draws};
  }
  Graph graph;
  c10::SmallVector<BufferRef, 0> inputs;
};

std::shared_ptr<const Outcome<VariantRef>> start_making(const std::shared_ptr<Program>& program,
                                                        const std::shared_ptr<Missed>& missed,
                                                        Compile how, const Origin& origin);

// Has the program made, and waits for it. If that fails and `undone` says that the flush has
// something to undo, the graph is undone; else what does not depend on an operator that cannot be
// lowered is pending again.
VariantRef make_program(ir::PendingSet& pending, const std::shared_ptr<Program>& program,
                        const std::shared_ptr<Missed>& missed, Compile how, const Origin& origin,
                        ExecutionSlot& slot, bool undone);

// Makes all that a graph took pending again.
void make_pending_again(ir::PendingSet& pending, Graph& graph);

}  // namespace lazyxla::graph
