// The walk: from the pending storages to a flat, numbered graph and its canonical key
// (program/graph.h).
//
// Detaching is two steps. Under the device's mutex the storages get leaves on promised buffers;
// then others go on recording, while the graph is numbered. Flushes number one after the other.
#pragma once

#include <c10/util/FunctionRef.h>

#include <vector>

#include "ir/storage.h"
#include "program/graph.h"

namespace lazyxla::graph {

// Takes all storages of the set, gives them leaves on promised buffers, and calls `detached` under
// the mutex of the device, which it takes. False if nothing is pending. Then numbers their graph.
// `setting` is what else the program depends on, and becomes part of the key. `graph` is empty
// before.
bool detach(ir::PendingSet& pending, uint64_t setting, Graph& graph,
            c10::function_ref<void()> detached);

// A graph with so many results is looked through for parts that have nothing but leaves in common,
// since the time to compile it grows faster than its size. (XLA's CPU compiler: 7 s for 1,000
// results of one operator each, 39 s for 3,000.) Parts have about so many results.
constexpr size_t kManyOutputs = 1024, kPartOutputs = 256;

// Takes such a graph apart, and one for several meshes (program/partition.h) into what is for each.
// Empty, and the graph as it was, if it is neither or hangs together. Parts that were recorded
// alike are the same program.
std::vector<Graph> split(Graph& graph);

}  // namespace lazyxla::graph
