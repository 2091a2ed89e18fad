// Runs of programs that are partitioned over many devices (program/partition.h).
//
// As any run (execute.h), but every device of the mesh is given its part of each input, and all
// numbers that are inputs; each result is a buffer on every device.
#pragma once

#include <functional>

#include "graph/execute.h"

namespace lazyxla::graph {

// Enqueues it, and keeps its promises.
void execute_partitioned(const program::Variant& variant, const Run& run, c10::DeviceIndex device);

// Waits until all devices have done what was enqueued. Throws the first failure that was not
// reported yet, as pjrt::Error; this also counts as the report of the other devices that failed
// with it.
void await_all_devices();

// Called before the launch of a program that is for the devices of other processes, too: throws
// unless they launch the same one. Set once, when processes connect; takes no lock of ours.
using LaunchCheck = std::function<void(const ir::Mesh& mesh, const program::Variant& variant)>;
void set_launch_check(LaunchCheck check);

// For the reader of a failed result: the first failure of the mesh's devices that was not reported
// yet. It counts as reported from then on.
std::optional<pjrt::Error> take_failure_of(const ir::Mesh& mesh);

}  // namespace lazyxla::graph
