#include "program/mesh_devices.h"

#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>

#include <memory>
#include <set>

#include "pjrt/runtime.h"

namespace lazyxla::graph {
namespace {

MeshDevices find(const ir::Mesh& mesh) {
  const pjrt::Client& client = pjrt::Runtime::get().client();
  const int first = client.first_device();
  const int last = first + static_cast<int>(client.devices().size());
  MeshDevices own;
  std::set<int64_t> processes;
  for (size_t position = 0; position < mesh.size(); ++position) {
    const int device = mesh.devices()[position];
    TORCH_CHECK_INDEX(device < static_cast<int>(client.all_devices().size()), "lazyxla: the mesh (",
                      mesh.text(), ") has a device that is not there");
    processes.insert(client.process_of(device));
    if (device < first || device >= last) continue;
    own.positions.push_back(position);
    own.devices.push_back(&client.devices()[device - first]);
  }
  own.processes.assign(processes.begin(), processes.end());
  own.are_all = own.positions.size() == mesh.size();
  TORCH_CHECK_VALUE(!own.devices.empty(), "lazyxla: the mesh (", mesh.text(),
                    ") has none of this process's devices, which are ", first, " to ", last - 1);
  return own;
}

}  // namespace

const MeshDevices& own_devices(const ir::Mesh& mesh) {
  // Each thread has its own: they are asked for at every run.
  thread_local ska::flat_hash_map<const ir::Mesh*, std::unique_ptr<const MeshDevices>> known;
  auto& found = known[&mesh];
  if (!found) found = std::make_unique<const MeshDevices>(find(mesh));
  return *found;
}

bool any_spans_processes() {
  pjrt::Runtime& runtime = pjrt::Runtime::get();
  return ir::Mesh::any() && runtime.initialized() && runtime.client().spans_processes();
}

bool holds_all(const ir::Sharding& sharding) {
  const MeshDevices& own = own_devices(sharding.mesh());
  if (own.are_all) return true;
  std::set<std::vector<int64_t>> held;
  for (const size_t position : own.positions) held.insert(sharding.tile_of(position));
  int64_t tiles = 1;
  for (size_t i = 0; i < sharding.rank(); ++i) tiles *= sharding.tiles(i);
  return static_cast<int64_t>(held.size()) == tiles;
}

}  // namespace lazyxla::graph
