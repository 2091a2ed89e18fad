// The walk: from the pending storages to a flat, numbered graph and its canonical key.
//
// The canonical key is what decides whether two graphs are the same program. It lists, in
// post-order from the outputs, every node as its OpSpec's id and operand numbers, every leaf as its
// element type and shape (a leaf used twice has one number), the outputs, and which inputs may give
// their memory to which output. The values of scalars are not in it; they stand beside it in
// `slots`. It depends on what was recorded alone: who else refers to a tensor when, which timing
// may decide, is no part of it.
//
// Values are numbered as the lowering numbers them: leaves 0..n-1 in order of first use, then each
// node's outputs, node after node.
//
// Donation: `x.add_(1)` leaves the old content of x, whose memory may hold the new one. That it may
// is part of the program (`aliases`); whether it does is decided at each call, for somebody else
// may want the old content (`donated`).
//
// Detaching is two steps. Under the device's mutex the storages get leaves on promised buffers;
// then others go on recording, while the graph is numbered. Flushes number one after the other.
#pragma once

#include <memory>
#include <vector>

#include "graph/undo.h"
#include "ir/storage.h"
#include "program/buffer.h"
#include "program/partition.h"

namespace lazyxla::graph {

struct Graph {
  std::vector<ir::NodePtr> leaves;
  std::vector<ir::NodePtr> nodes;  // operands before users
  std::vector<uint32_t> values;    // number of each node's first output
  std::vector<uint32_t> records;   // where in `key` each node's operands are listed
  std::vector<uint32_t> outputs;   // value numbers, one per computed value
  std::vector<ir::TensorType> output_types;
  std::vector<std::shared_ptr<DeviceBuffer>> promises;  // parallel to outputs
  std::vector<Taken> taken;
  std::vector<ir::Draws> draws;
  std::vector<int> aliases;  // per leaf: the output that may take its memory over, or -1
  std::vector<int> donated;  // the leaves whose memory is taken over in this call, ascending
  std::vector<ir::ScalarValue> slots;
  std::vector<uint64_t> key;
  uint64_t hash = 0;
  std::shared_ptr<const Partition> partition;  // of a graph for many devices, else null

  // The number of a node's operand. (What the walk leaves in the nodes themselves holds under its
  // mutex only: a node may be in another thread's graph, too.)
  uint32_t operand(size_t node, size_t position) const;

  // Appending to the graph and its key, operands before users. Each returns the position.
  uint32_t add_leaf(ir::NodePtr leaf);
  uint32_t add_node(ir::NodePtr node);  // each of its operands is to be added next:
  void add_operand(uint32_t position, uint32_t index, bool is_leaf) {
    key.push_back((uint64_t{position} << 17) | (uint64_t{index} << 1) | (is_leaf ? 1 : 0));
  }
  // Once all are there: numbers the values; once `outputs` and `aliases` are, completes the key.
  void number_values();
  void complete_key();

  // Empties it; its lists keep their memory.
  void clear();
  // The same, but for what was taken from the pending set.
  void clear_numbers();
};

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

// Takes such a graph apart, and one for several meshes (partition.h) into what is for each. Empty,
// and the graph as it was, if it is neither or hangs together. Parts that were recorded alike are
// the same program.
std::vector<Graph> split(Graph& graph);

}  // namespace lazyxla::graph
