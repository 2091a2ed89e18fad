// What the plugin reports of a device, attached (client.h) or not (topology.h).
#pragma once

#include <pjrt_c_api.h>

#include <cstdint>
#include <string>

#include "pjrt/plugin.h"

namespace lazyxla::pjrt {

struct DeviceDescription {
  int64_t id = 0;             // unique among all processes
  int64_t process_index = 0;  // the process (on TPUs: the host) that would own it
  std::string kind;           // the model, for example "TPU v5 lite"
  NamedValues attributes;     // the plugin's own, on TPUs for example "coords"
};

DeviceDescription describe(const PJRT_Api* api, PJRT_DeviceDescription* raw);

}  // namespace lazyxla::pjrt
