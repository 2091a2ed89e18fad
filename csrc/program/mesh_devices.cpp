#include "program/mesh_devices.h"

#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>

#include <memory>
#include <set>

#include "pjrt/runtime.h"

namespace lazyxla::program {
namespace {

MeshDevices find(const ir::Mesh& mesh) {
  const pjrt::Client& client = pjrt::Runtime::get().client();
  const int first = client.first_device();
  const int last = first + static_cast<int>(client.devices().size());
  const int all = static_cast<int>(client.all_devices().size());
  MeshDevices own;
  std::set<int64_t> processes;
  for (size_t position = 0; position < mesh.size(); ++position) {
    const int device = mesh.devices()[position];
    if (device < all) processes.insert(client.process_of(device));
    if (device < first || device >= last) continue;
    own.positions.push_back(position);
    own.devices.push_back(&client.devices()[device - first]);
  }
  own.processes.assign(processes.begin(), processes.end());
  own.are_all = own.positions.size() == mesh.size();
  return own;
}

// For a mesh that may be a topology's, whose devices do not exist here.
const MeshDevices& found_devices(const ir::Mesh& mesh) {
  // One table per thread, since every run reads it.
  thread_local ska::flat_hash_map<const ir::Mesh*, std::unique_ptr<const MeshDevices>> known;
  auto& found = known[&mesh];
  if (!found) found = std::make_unique<const MeshDevices>(find(mesh));
  return *found;
}

}  // namespace

const MeshDevices& own_devices(const ir::Mesh& mesh) {
  const MeshDevices& own = found_devices(mesh);
  if (!own.devices.empty()) [[likely]]
    return own;
  const pjrt::Client& client = pjrt::Runtime::get().client();
  TORCH_CHECK_VALUE(false, "lazyxla: the mesh (", mesh.text(),
                    ") has none of this process's devices, which are ", client.first_device(),
                    " to ", client.first_device() + client.devices().size() - 1);
}

bool client_spans_processes() {
  pjrt::Runtime& runtime = pjrt::Runtime::get();
  if (!runtime.initialized()) return false;
  // The answer never changes. A forked child, which has no client, must not ask it.
  static const bool spans = runtime.client().spans_processes();
  return spans;
}

bool mesh_spans_processes(const ir::Mesh& mesh) {
  return client_spans_processes() && found_devices(mesh).processes.size() > 1;
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

}  // namespace lazyxla::program
