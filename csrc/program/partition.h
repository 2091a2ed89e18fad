// Partition: how a graph's inputs and results are spread over many devices.
//
// A graph that reads or writes anything sharded, or sets a value's sharding (ir/sharding.h), is one
// program for all devices of the mesh: the compiler partitions it and adds the communication. All
// other graphs have no partition.
//
//     inputs    as their data is spread; data on one device is given to all of them
//     results   as set by the storage that takes them, or by the operator that makes them; or like
//               the old content, if they may take over its memory; all others as the partitioner
//               chooses, which is known once the program is compiled
//
// A graph has one mesh. One with several is split if the parts share nothing but leaves
// (graph/walk.h's split); else it is an error, raised when its program is to be made.
//
// If a mesh has devices of several processes, all of them launch a program for it. So it contains
// nothing that one of them can compute by itself: no nodes that share only leaves with it, and none
// that read only values that each device has whole.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ir/sharding.h"
#include "pjrt/compiled_program.h"
#include "program/buffer.h"

namespace lazyxla::program {

struct Graph;

// How a result is split over the devices: the number of tiles in each dimension, and per partition
// the index of its tile in each dimension.
struct ResultTiles {
  std::vector<int64_t> tiles;
  std::vector<std::vector<int64_t>> tile_of;
};

// Returns the tiles of each result of a compiled program; `ranks` are the results'. Set once, by
// the bindings; takes the GIL itself.
using ResultReader = std::function<std::vector<ResultTiles>(
    const pjrt::CompiledProgram&, const std::vector<size_t>& ranks, size_t partitions)>;
void set_result_reader(ResultReader reader);

struct Partition {
  const ir::Mesh* mesh = nullptr;
  const ir::Mesh* other = nullptr;           // another one that the graph is for, too
  std::vector<const ir::Sharding*> inputs;   // one per leaf
  std::vector<const ir::Sharding*> results;  // one per output; null: the partitioner chooses
  std::vector<size_t> ranks;                 // of the outputs

  // Throws if there are two meshes.
  void check() const;
  // Whether the program is for devices of other processes, too. Then all must make the same
  // program, independent of what each has done before.
  bool spans_processes() const;
  // The mesh's, as an option to compile with.
  std::string devices() const;
  void add_to_key(std::vector<uint64_t>& key) const;
  size_t words() const { return 3 + inputs.size() + results.size(); }  // that this adds
  // Its content as a text that is the same in all processes.
  std::string text() const;
  // How the results of the compiled program are spread.
  std::vector<const ir::Sharding*> results_of(const pjrt::CompiledProgram& program) const;
};

// The mesh that an operator must run on because it reads this leaf; null if any device will do.
const ir::Mesh* needed_mesh(const ir::OpSpec& reader, const ir::Node& leaf);

// Whether the sharding of one of the leaves is not known yet: its buffer.
BufferRef unknown_leaf(const Graph& graph);

// Gives the graph, whose aliases are found, its partition if it has one, and sets the sharding of
// its promises. A result that cannot take over an input's memory then is no alias any more.
void find_partition(Graph& graph);

}  // namespace lazyxla::program
