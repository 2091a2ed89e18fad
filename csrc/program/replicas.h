// Replicas: processes that run a program together, each on a device of its own.
//
// Where the client spans the processes (pjrt::Client::spans_processes), collectives are the
// compiler's. The members of a group, its replicas, run one program of a whole graph, if all of
// them have the same one; those of several groups, if these are rows of a grid
// (lazyxla/planning/collectives.py):
//
//     gradients = backward(loss)
//     all_reduce(gradients)            1     that of all members of the group
//     step(parameters, gradients)
//
// But what they compute between collectives may differ: one logs, another is a pipeline's next
// stage. Then each collective is a program of its own, and the operators between two collectives
// are a program that is the process's alone:
//
//     gradients = backward(loss)       1     this process's
//     all_reduce(gradients)            2     that of all members of the group
//     step(parameters, gradients)      3     this process's
//
// The graph remains one flush: it is cut (cut.h) there, and run as one that is cut for other
// reasons. Before a program of several processes is launched, the members agree that all are about
// to (set_collectives); at the same time they find out which of the two modes it is. If their
// graphs differ in nothing but numbers that were built in, such as where a shard begins, another
// program is made that takes them as inputs.
//
// A collective that no compiler has, such as a message from one process to another, is exchanged by
// the host at that point.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "program/cut.h"
#include "program/host_program.h"
#include "program/planner.h"
#include "program/variant.h"

namespace lazyxla::program {

struct Replicas {
  struct Group {
    std::string name;         // the process group's, which its collectives have
    std::vector<Ranks> rows;  // this group, and others like it: their members, by replica
    int64_t first = 0;        // of its collectives, by position among all of the program's
    int64_t calls = 1;
  };
  std::vector<Group> groups;     // this process's, in the order of their first collectives
  std::vector<int64_t> devices;  // of the replicas in turn, by their positions among all devices
  bool by_host = false;          // whether the host exchanges the data
  bool is_whole = false;         // a whole graph, not one collective of it
  int64_t calls = 1;             // collectives
  // Which input and result of the program is the token that numbers collectives.
  uint32_t token_input = 0, token_result = 0;

  // The devices as an option to compile with.
  std::string devices_text() const;
  // A text for a group that is the same in all processes; null if it is none of the groups here.
  std::optional<std::string> describe(const std::string& group) const;
  void add_to_key(std::vector<uint64_t>& key) const;
};

// The outcome of a launch. It is the same for all members.
enum class Launched : uint8_t {
  kYes,
  kNo,             // not all have this whole graph
  kNumbersDiffer,  // nor that, but the graphs differ only in numbers that are constants
};

// Functions of the distributed room. Set once.
struct Collectives {
  // The caller of a collective.
  struct Caller {
    std::string group;
    Ranks ranks;
    bool by_host;   // as in Replicas
    bool compares;  // whether the group's members compare what they are in
  };
  // Throws if its group was destroyed.
  std::function<Caller(const ir::OpSpec&)> caller_of;
  // The host's program of a graph of one collective.
  std::function<HostProgram(const Graph&)> on_host;
  // Does `launch` once all members are known to launch the call of this turn (the token's number);
  // throws if they differ. A whole graph, which has an identity, is launched if all have the same;
  // else all continue call by call, with programs that the process has (`has_parts`) or still has
  // to make. Called without the GIL.
  std::function<Launched(const Replicas&, int64_t turn, const Identity* whole, bool has_parts,
                         c10::function_ref<void()> launch)>
      launch;
  // Instead of another launch, after one that was not made, if this process cannot make the program
  // for it, or a launch before it failed. The other members, which wait for it, fail with the
  // reason. Called without the GIL.
  std::function<void(const Replicas&, int64_t turn, const std::string& reason)> give_up;
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

// Such a graph as one program of all members, if it can be: its collectives are the compiler's.
std::optional<Piece> whole_of(const Graph& graph);

// The pieces of such a graph, in their order: each collective by itself, with all of its operands
// as inputs and all of its results as outputs, even if this process does not read them.
std::vector<Piece> cut_at_collectives(const Graph& graph);

}  // namespace lazyxla::program
