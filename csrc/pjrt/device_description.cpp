#include "pjrt/device_description.h"

#include "pjrt/call.h"

namespace lazyxla::pjrt {

DeviceDescription describe(const PJRT_Api* api, PJRT_DeviceDescription* raw) {
  LAZYXLA_PJRT_ARGS(id, PJRT_DeviceDescription_Id);
  id.device_description = raw;
  LAZYXLA_PJRT_CALL(api, PJRT_DeviceDescription_Id, id);

  LAZYXLA_PJRT_ARGS(process, PJRT_DeviceDescription_ProcessIndex);
  process.device_description = raw;
  LAZYXLA_PJRT_CALL(api, PJRT_DeviceDescription_ProcessIndex, process);

  LAZYXLA_PJRT_ARGS(kind, PJRT_DeviceDescription_Kind);
  kind.device_description = raw;
  LAZYXLA_PJRT_CALL(api, PJRT_DeviceDescription_Kind, kind);

  LAZYXLA_PJRT_ARGS(attributes, PJRT_DeviceDescription_Attributes);
  attributes.device_description = raw;
  LAZYXLA_PJRT_CALL(api, PJRT_DeviceDescription_Attributes, attributes);

  return {.id = id.id,
          .process_index = process.process_index,
          .kind = std::string(kind.device_kind, kind.device_kind_size),
          .attributes = read_named_values(attributes.attributes, attributes.num_attributes)};
}

}  // namespace lazyxla::pjrt
