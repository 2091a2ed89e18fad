#include "pjrt/device_description.h"

#include "pjrt/call.h"

namespace lazyxla::pjrt {

DeviceDescription describe(const PJRT_Api* api, PJRT_DeviceDescription* raw) {
  LAZYXLA_PJRT_QUERY(id, api, PJRT_DeviceDescription_Id, device_description, raw);

  LAZYXLA_PJRT_QUERY(process, api, PJRT_DeviceDescription_ProcessIndex, device_description, raw);

  LAZYXLA_PJRT_QUERY(kind, api, PJRT_DeviceDescription_Kind, device_description, raw);

  LAZYXLA_PJRT_QUERY(attributes, api, PJRT_DeviceDescription_Attributes, device_description, raw);

  return {.id = id.id,
          .process_index = process.process_index,
          .kind = std::string(kind.device_kind, kind.device_kind_size),
          .attributes = read_named_values(attributes.attributes, attributes.num_attributes)};
}

}  // namespace lazyxla::pjrt
