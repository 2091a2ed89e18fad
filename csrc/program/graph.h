// Graph: what a program is compiled for, flat and numbered.
//
// The walk (graph/walk.h) makes one of the pending storages. Its canonical key decides whether two
// graphs are the same program. It lists, in post-order from the outputs, every node as its OpSpec's
// id and operand numbers, every leaf as its element type and shape (a leaf used twice has one
// number), the outputs, and which inputs may give their memory to which output. The values of
// scalars are not in it; they are kept separately, in `slots`. It depends only on what was
// recorded, not on the other references to a tensor, which timing may decide.
//
// Values are numbered as the lowering numbers them: leaves 0..n-1 in order of first use, then each
// node's outputs, node after node.
//
// Donation: `x.add_(1)` leaves the old content of x, whose memory may hold the new one. That it may
// is part of the program (`aliases`); whether it does is decided at each call, since the old
// content may have other references (`donated`).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ir/storage.h"
#include "program/buffer.h"
#include "program/partition.h"

namespace lazyxla::program {

struct Replicas;

// A storage whose content a flush replaced. (It may be dead by now.)
struct Taken {
  uint64_t id;
  ir::Value value;                         // what was recorded
  ir::Content committed;                   // the data it had before, or nothing
  uint32_t output;                         // of the graph, that becomes its content
  const ir::Sharding* sharding = nullptr;  // the storage's
};

// A storage that was made before anything was computed from data: its content then, and at the end.
struct Made {
  uint32_t value;
  uint32_t output;  // the same, or what was written since
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
  std::vector<ir::Draws> draws;
  std::vector<int> aliases;  // per leaf: the output that may take its memory over, or -1
  std::vector<int> donated;  // the leaves whose memory is taken over in this call, ascending
  std::vector<ir::ScalarValue> slots;
  std::vector<uint64_t> key;
  uint64_t hash = 0;
  std::shared_ptr<const Partition> partition;  // of a graph for many devices, else null
  std::shared_ptr<const Replicas> replicas;    // of one that several processes run, else null

  // The number of a node's operand. (The numbers that the walk leaves in the nodes are valid under
  // its mutex only: a node may be in another thread's graph, too.)
  uint32_t operand(size_t node, size_t position) const;
  // The position of the node that makes the value, which is no leaf.
  size_t maker(uint32_t value) const;
  // How many were recorded, or traced.
  int64_t operators() const;
  // The storages that were made before anything was computed from data.
  std::vector<Made> made_first() const;

  // Appending to the graph and its key, operands before users. Each returns the position.
  uint32_t add_leaf(ir::NodePtr leaf);
  uint32_t add_node(ir::NodePtr node);  // each of its operands is to be added next:
  void add_operand(uint32_t position, uint32_t index, bool is_leaf) {
    key.push_back((uint64_t{position} << 32) | (uint64_t{index} << 1) | (is_leaf ? 1 : 0));
  }
  // number_values is called once all nodes are added; complete_key once `outputs` and `aliases` are
  // set.
  void number_values();
  void complete_key();
  // After complete_key: several processes run it.
  void set_replicas(std::shared_ptr<const Replicas> of);

  // Empties it; its lists keep their memory.
  void clear();
  // The same, but for what was taken from the pending set.
  void clear_numbers();
};

// The portable key: the canonical key in bytes that mean the same in every process. The canonical
// key names operators by their OpSpecs' ids, which each process gives out anew; here every OpSpec
// is written out once, and referred to by its index. Empty if an operator means something in this
// process only: a graph of torch.compile's, or an argument that cannot be written out.
std::optional<std::string> portable_key(const Graph& graph);

// Compile options: XLA's, that a program is compiled with. Those of the process and of a compiled
// region belong to the program: a number that this process gave to the set of them is the first
// word of every canonical key; 0 is that of none. Those of an operator (a function that was
// compiled with options of its own) are in its OpSpec.
uint64_t number_options(const CompileOptions& options);
const CompileOptions& options_of(uint64_t number);

// All that the graph is compiled with. Its operators must agree on theirs.
CompileOptions compile_options(const Graph& graph);

}  // namespace lazyxla::program
