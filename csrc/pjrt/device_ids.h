// The devices of a partitioned program, as the plugin knows them.
#pragma once

#include <functional>

#include "executable.h"

namespace lazyxla::pjrt {

// The options with the devices of kDevices by their ids in place of their positions; `id_of` tells
// the id of one of `count` devices. Throws Error if there is no such device.
CompileOptions with_device_ids(CompileOptions options, size_t count,
                               const std::function<int64_t(size_t)>& id_of);

}  // namespace lazyxla::pjrt
