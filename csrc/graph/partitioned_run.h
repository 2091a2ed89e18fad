// Runs of programs that are partitioned over many devices (program/partition.h).
//
// As any run (execute.h), but every device of the mesh is given its part of each input, and the
// numbers that are inputs whole; each result is a buffer on every device.
#pragma once

#include "graph/execute.h"

namespace lazyxla::graph {

// Enqueues it, and keeps its promises.
void execute_partitioned(const Variant& variant, const Run& run, c10::DeviceIndex device);

// Waits until all devices have done what was enqueued. Throws the first failure that was not told
// yet, as pjrt::Error; the devices that failed with it have told theirs with that.
void await_all_devices();

// For somebody whose result has failed: the first failure of the mesh's devices that was not told
// yet. It is told with that.
std::optional<pjrt::Error> take_failure_of(const ir::Mesh& mesh);

}  // namespace lazyxla::graph
