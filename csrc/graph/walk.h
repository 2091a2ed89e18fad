// The walk: from the pending storages to a flat, numbered graph and its canonical key.
//
// The canonical key is what decides whether two graphs are the same program. It lists, in
// post-order from the outputs, every node as its OpSpec's id and operand numbers, every leaf as its
// element type and shape (a leaf used twice has one number), the outputs, and which inputs are
// donated to which output. The values of scalars are not in it; they stand beside it in `slots`.
//
// Values are numbered as the lowering numbers them: leaves 0..n-1 in order of first use, then each
// node's outputs, node after node.
//
// Donation: a leaf that only this graph refers to dies with the run, so its memory may hold an
// output. `x.add_(1)` leaves the old content of x in that position: the output that takes its place
// is preferably the new content of the same storage, else the first of the same type.
#pragma once

#include <vector>

#include "graph/buffer.h"
#include "ir/storage.h"

namespace lazyxla::graph {

// A storage whose value a flush took, so that a flush that fails can give it back.
struct Taken {
  ir::Storage* storage;  // may be dead by now: see Storage::find
  uint64_t id;
  ir::Value value;
  uint32_t output;
};

struct Graph {
  std::vector<ir::NodePtr> leaves;
  std::vector<ir::NodePtr> nodes;  // operands before users
  std::vector<uint32_t> values;    // number of each node's first output
  std::vector<uint32_t> records;   // where in `key` each node's operands are listed
  std::vector<uint32_t> outputs;   // value numbers, one per computed value
  std::vector<ir::TensorType> output_types;
  std::vector<std::shared_ptr<DeviceBuffer>> promises;  // parallel to outputs
  std::vector<Taken> taken;
  std::vector<int> donations;  // per leaf: position in outputs, or -1
  std::vector<ir::ScalarValue> slots;
  std::vector<uint64_t> key;
  uint64_t hash = 0;

  // The number of a node's operand. (What the walk leaves in the nodes themselves holds under the
  // mutex only: a leaf may be in another thread's graph, too.)
  uint32_t operand(size_t node, size_t position) const;

  // Empties it; its lists keep their memory.
  void clear();
};

// Takes all pending storages of the set: numbers their graph, gives them leaves on promised buffers
// and empties the set. `setting` is what else the program depends on, and becomes part of the key.
// `graph` is empty before. Caller holds the mutex, and drops the graph after releasing it.
void detach(ir::PendingSet& pending, uint64_t setting, Graph& graph);

// Gives the storages back what they had, unless it depends on node `failed` of the graph; the
// others keep their promises, which the caller breaks. Takes the mutex.
void restore(ir::PendingSet& pending, Graph& graph, size_t failed);

}  // namespace lazyxla::graph
