// The planner: how a graph that is new becomes programs. lazyxla/planning decides; workers ask.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace lazyxla::program {

struct Graph;

struct Plan {
  std::string reason;               // why the graph is new, in words
  std::vector<uint32_t> stages;     // per node, how it is best cut (cut.h); empty if not at all
  bool even_are_new = false;        // even stages are of what no graph before had
  bool is_certain = false;          // else it is cut only if the largest stage not new is known
  std::vector<bool> varying;        // per slot, whether it should be an input at once; or empty
  std::vector<uint32_t> otherwise;  // the stages if it is not cut into those; or empty
};

using Ranks = std::vector<int64_t>;

// Groups of a program that all of them run together.
struct ReplicaGroups {
  Ranks ranks;                           // of all processes, ascending; each is a replica
  std::vector<std::vector<Ranks>> rows;  // for each group, all of its kind, by replica
};

struct Planner {
  // Compares the graph with those before, and remembers it. `may_cut`: into rounds of a loop.
  // `may_share`: whether to look for parts that others have, which takes time. `may_alternate`:
  // whether such parts may be several, with new ones between them.
  std::function<Plan(const Graph&, bool may_cut, bool may_share, bool may_alternate)> plan;
  // Per node its stage: collectives have the odd ones.
  std::function<std::vector<uint32_t>(const Graph&)> cut_at_collectives;
  // `groups`: those of one process. Nothing if they are no rows of a grid.
  std::function<std::optional<ReplicaGroups>(const std::vector<Ranks>& groups)> arrange;
};

// Set once, by the bindings.
inline auto& planner = *new Planner();

}  // namespace lazyxla::program
