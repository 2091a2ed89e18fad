// Transfers: data on its way between the host and the devices, or between two devices.
//
// While data is abstract, as it is for the time of a capture (record/capture.h), nothing reaches a
// device: uploads and copies are leaves that have a type and no data.
#pragma once

#include <c10/core/Device.h>

#include "program/buffer.h"

namespace lazyxla::graph {

void set_data_abstract(bool is_abstract);
bool data_is_abstract();

// Copies host data (dense, row-major, of the given type) to the device.
ir::Value upload(const void* data, const ir::TensorType& type, c10::DeviceIndex device);

// The same, each device of the sharding's mesh getting its part.
ir::Value upload(const void* data, const ir::TensorType& type, const ir::Sharding& sharding);

// Copies the leaf's data to another device.
ir::Value copy_to_device(const ir::Value& leaf, c10::DeviceIndex device);

// Waits for the leaf's data and copies it (dense, row-major) to `destination`.
void download(const ir::Value& leaf, void* destination);

}  // namespace lazyxla::graph
