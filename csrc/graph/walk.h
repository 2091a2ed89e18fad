// The walk: from the pending storages to a flat, numbered graph and its canonical key
// (program/graph.h).
//
// Detaching is two steps. Under the device's mutex the storages get leaves on promised buffers;
// then other threads go on recording, while the graph is numbered. Flushes number one after the
// other.
#pragma once

#include <c10/util/FunctionRef.h>

#include <vector>

#include "ir/storage.h"
#include "program/graph.h"

namespace lazyxla::graph {

// Takes all storages of the set, gives them leaves on promised buffers, and calls `detached` under
// the mutex of the device, which it takes. False if nothing is pending. Then numbers their graph.
// `setting`, the program's other dependencies, becomes part of the key. `graph` is empty before.
bool detach(ir::PendingSet& pending, uint64_t setting, program::Graph& graph,
            c10::function_ref<void()> detached);

// A graph with this many results is searched for parts that share only leaves, since the time to
// compile it grows faster than its size. (XLA's CPU compiler: 7 s for 1,000 results of one operator
// each, 39 s for 3,000.) Parts have about kPartOutputs results.
constexpr size_t kManyOutputs = 1024, kPartOutputs = 256;

// Splits such a graph, and one for several meshes (program/partition.h) into a part for each.
// Empty, and the graph unchanged, if it is neither or is connected. Parts that were recorded alike
// are the same program.
std::vector<program::Graph> split(program::Graph& graph);

}  // namespace lazyxla::graph
