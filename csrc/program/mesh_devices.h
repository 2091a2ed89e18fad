// The devices of a mesh that are this process's.
//
// A mesh may be of the devices of several processes (pjrt/client.h). Each holds the parts of a
// sharded tensor that are its devices', and gives them to a program; the other processes do the
// same with theirs.
#pragma once

#include <vector>

#include "ir/sharding.h"
#include "pjrt/client.h"

namespace lazyxla::program {

struct MeshDevices {
  std::vector<size_t> positions;             // in the mesh, ascending
  std::vector<const pjrt::Device*> devices;  // one for each of them
  bool are_all;                              // that the mesh has
  std::vector<int64_t> processes;            // of all the mesh's devices, ascending
};

// Starts the client. Throws if there are none.
const MeshDevices& own_devices(const ir::Mesh& mesh);

// Whether the mesh has devices of other processes.
bool mesh_spans_processes(const ir::Mesh& mesh);

// Whether the client is started, and has devices of other processes.
bool client_spans_processes();

// Whether this process holds all parts of data with this sharding.
bool holds_all(const ir::Sharding& sharding);

}  // namespace lazyxla::program
