// Flush: runs what is recorded. Sync: the user's word for it.
//
// A flush detaches everything pending on a device (walk.h), finds or makes the program (program.h),
// enqueues it and keeps its promises (execute.h). It returns when the program is enqueued; the data
// arrives later, and whoever reads it waits. Any thread may flush; a flush takes the device's mutex
// only to detach, so others go on recording meanwhile.
//
// If lowering, compiling or enqueueing fails, the flush throws, the values that it should have
// computed throw the same reason when read, and the device stays usable. If one operator cannot be
// lowered, only what depends on it is lost.
//
// While a capture (capture.h) is active nothing is run, uploaded or copied: all results are
// abstract.
#pragma once

#include <c10/core/Device.h>

#include "graph/buffer.h"
#include "graph/scope.h"
#include "ir/storage.h"

namespace lazyxla::graph {

// Runs all that is pending on the device. No-op if nothing is. Throws if the thread is in a region
// that `cause` must not break.
void flush(c10::DeviceIndex device, Cause cause);

// flush, and with `wait` also waits until the device has computed it all. Execution errors surface.
void sync(c10::DeviceIndex device, bool wait, Cause cause);

// Copies host data (dense, row-major, of the given type) to the device.
ir::Value upload(const void* data, const ir::TensorType& type, c10::DeviceIndex device);

// Copies the leaf's data to another device.
ir::Value copy_to_device(const ir::Value& leaf, c10::DeviceIndex device);

// Waits for the leaf's data and copies it (dense, row-major) to `destination`.
void download(const ir::Value& leaf, void* destination);

}  // namespace lazyxla::graph
