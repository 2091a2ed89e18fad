// The groups of a program that all of them run together: along the axes of a grid.
//
// A process knows the groups that it is in. If they are the rows of a grid through its own
// position, as those of a torch.distributed.DeviceMesh are, all other groups follow:
//
//     of process 2:  {2, 3} and {0, 2}         0 1     along one axis {0, 1} and {2, 3},
//                                              2 3     along the other {0, 2} and {1, 3}
//
// A group may also be along several axes at once, such as that of all processes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace lazyxla::graph {

using Ranks = std::vector<int64_t>;

struct ReplicaGroups {
  Ranks ranks;                           // of all processes, ascending; each is a replica
  std::vector<std::vector<Ranks>> rows;  // for each group, all of its kind, by replica
};

// `groups`: those of one process. Nothing if they are no rows of a grid; it does not check the
// groups of the other processes.
std::optional<ReplicaGroups> arrange(const std::vector<Ranks>& groups);

}  // namespace lazyxla::graph
