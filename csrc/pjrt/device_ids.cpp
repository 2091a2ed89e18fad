#include "device_ids.h"

#include "error.h"

namespace lazyxla::pjrt {

CompileOptions with_device_ids(CompileOptions options, size_t count,
                               const std::function<int64_t(size_t)>& id_of) {
  std::string ids;
  for (const int64_t position : devices_of(options)) {
    if (position < 0 || static_cast<size_t>(position) >= count) {
      throw Error(PJRT_Error_Code_INVALID_ARGUMENT,
                  "the program is for a mesh with device " + std::to_string(position) +
                      ", and there are " + std::to_string(count) + " devices");
    }
    ids += (ids.empty() ? "" : ",") + std::to_string(id_of(position));
  }
  if (!ids.empty()) options[kDevices] = ids;
  return options;
}

}  // namespace lazyxla::pjrt
