#include "graph/partitioned_run.h"

#include <c10/util/Exception.h>

#include <utility>

#include "common/gil.h"
#include "pjrt/client.h"
#include "pjrt/runtime.h"
#include "program/mesh_devices.h"

namespace lazyxla::graph {
namespace {

// Reuses the memory of the thread's last run, as a flush's graph does. A run within a run has its
// own.
thread_local std::vector<pjrt::Buffer*> spare_args;

void keep(const program::Variant& variant, const Run& run,
          std::vector<std::vector<pjrt::Buffer>> results) {
  for (size_t i = 0; i < run.promises.size(); ++i) {
    run.promises[i]->keep(program::Shards{variant.results()[i], std::move(results[i])});
  }
}

// Throws if a device's part of the program needs more memory than is free. Donated inputs count as
// free: they are reused.
void check_fits(const program::Variant& variant, const Run& run,
                const std::vector<const pjrt::Device*>& devices) {
  int64_t needed = variant.bytes_needed();
  for (int number : run.donated) {
    const program::Shards* shards = run.inputs[number]->shards();
    if (shards) needed -= static_cast<int64_t>(shards->buffers.front().nbytes());
  }
  if (pjrt::Runtime::get().platform() == "cpu") {  // they share the host's memory
    return check_free(variant, needed * static_cast<int64_t>(devices.size()), *devices.front());
  }
  for (const pjrt::Device* device : devices) check_free(variant, needed, *device);
}

auto& launch_check = *new LaunchCheck();

}  // namespace

void set_launch_check(LaunchCheck check) { launch_check = std::move(check); }

void execute_partitioned(const program::Variant& variant, const Run& run, c10::DeviceIndex index) {
  const ir::Mesh& mesh = *variant.partition->mesh;
  const std::vector<const pjrt::Device*>& devices = program::own_devices(mesh).devices;
  check_fits(variant, run, devices);
  variant.note_run();
  std::vector<pjrt::Buffer*> args = std::exchange(spare_args, {});
  args.clear();
  args.reserve((run.inputs.size() + 2) * devices.size());  // and the numbers
  for (const program::BufferRef& input : run.inputs) input->add_each(mesh, args);
  Numbers numbers;
  upload_numbers(variant, run.slots, devices, numbers);
  for (pjrt::Buffer& array : numbers) args.push_back(&array);

  // A device may wait for the others, and one that calls the host for the GIL.
  WithoutGil no_gil;
  if (variant.identity && launch_check) launch_check(mesh, variant);
  keep(variant, run, undoable(run, index, [&](pjrt::InFlight::Listener over) {
         return variant.executable().execute_on_each(args, run.donated, devices, std::move(over));
       }));
  spare_args = std::move(args);
}

std::optional<pjrt::Error> take_failure_of(const ir::Mesh& mesh) {
  std::optional<pjrt::Error> first;
  for (const pjrt::Device* device : program::own_devices(mesh).devices) {
    auto failure = device->take_failure();
    if (!first) first = std::move(failure);
  }
  return first;
}

void await_all_devices() {
  std::optional<pjrt::Error> failure;
  for (const pjrt::Device& device : pjrt::Runtime::get().client().devices()) {
    try {
      device.await();
    } catch (const pjrt::Error& e) {
      if (!failure) failure = e;
    }
  }
  if (failure) throw *failure;
}

}  // namespace lazyxla::graph
