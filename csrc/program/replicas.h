// Replicas: processes that run a program together, each on a device of its own.
//
// Where the client spans the processes (pjrt::Client::spans_processes), collectives are the
// compiler's. What the processes compute between them may differ: one logs, another is a pipeline's
// next stage. So each collective is a program of its own, the same for all members of its group,
// which are its replicas; and the operators between two collectives are a program that is the
// process's alone:
//
//     gradients = backward(loss)       1     this process's
//     all_reduce(gradients)            2     that of all members of the group
//     step(parameters, gradients)      3     this process's
//
// The graph stays one flush: it is cut (cut.h) there, and run as one that is cut for other reasons.
// Before such a program is launched the members agree that all are about to (set_collectives).
//
// A collective that no compiler has, such as a message from one process to another, is exchanged by
// the host at that place.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "program/cut.h"
#include "program/host_program.h"

namespace lazyxla::graph {

struct Replicas {
  std::string group;             // the process group's name, which its collectives have
  std::vector<int64_t> devices;  // of its members in turn, by their positions among all devices
  bool by_host = false;          // whether the host exchanges the data

  // The devices as an option to compile with.
  std::string devices_text() const;
  void add_to_key(std::vector<uint64_t>& key) const;
};

// What the distributed room knows. Set once.
struct Collectives {
  // Who runs a collective; throws if its group was destroyed.
  std::function<std::shared_ptr<const Replicas>(const ir::OpSpec&)> replicas_of;
  // The host's program of a graph of one collective.
  std::function<HostProgram(const Graph&)> on_host;
  // Does `launch` once all members are known to launch the call of this turn (the token's number);
  // throws if they differ. Called without the GIL.
  std::function<void(const Replicas&, int64_t turn, c10::function_ref<void()> launch)> launch;
};
void set_collectives(Collectives collectives);
const Collectives& collectives();

// The devices that the processes of these ranks use: each the first of its own.
std::vector<int64_t> devices_of_ranks(const std::vector<int64_t>& ranks);

// Whether collectives are programs of their own: the client spans processes, or programs cannot
// call the host. Starts the client.
bool collectives_are_programs();

// Whether the graph is to be cut at its collectives.
bool is_cut_at_collectives(const Graph& graph);

// The pieces of such a graph, in their order: each collective by itself, with all of its operands
// as inputs and all of its results as outputs, whatever this process does with them.
std::vector<Piece> cut_at_collectives(const Graph& graph);

}  // namespace lazyxla::graph
