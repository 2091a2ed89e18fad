// Calling the C API, for this directory's .cpp files only. Every PJRT function takes one struct
// that states its own size, so that plugin and caller may be of different age:
//
//   LAZYXLA_PJRT_ARGS(args, PJRT_Buffer_ElementType);
//   args.buffer = raw;
//   LAZYXLA_PJRT_CALL(api, PJRT_Buffer_ElementType, args);   // throws Error
//   return args.type;
#pragma once

#include "error.h"

// Declares `name`, the zeroed argument struct of `function`.
#define LAZYXLA_PJRT_ARGS(name, function) \
  function##_Args name{};                 \
  name.struct_size = function##_Args_STRUCT_SIZE

#define LAZYXLA_PJRT_CALL(api, function, args) \
  ::lazyxla::pjrt::check((api), (api)->function(&(args)), #function)

namespace lazyxla::pjrt {

// Frees an error nobody looks at: of a destructor, or of a query whose failure means "not offered".
inline bool ignore_error(const PJRT_Api* api, PJRT_Error* error) {
  if (error == nullptr) {
    return false;
  }
  LAZYXLA_PJRT_ARGS(args, PJRT_Error_Destroy);
  args.error = error;
  api->PJRT_Error_Destroy(&args);
  return true;
}

inline void destroy_event(const PJRT_Api* api, PJRT_Event* event) {
  if (event != nullptr) {
    LAZYXLA_PJRT_ARGS(args, PJRT_Event_Destroy);
    args.event = event;
    ignore_error(api, api->PJRT_Event_Destroy(&args));
  }
}

// Waits for `event`, frees it and throws the failure it carries. A null event has happened already.
inline void await_event(const PJRT_Api* api, PJRT_Event* event, std::string_view what) {
  if (event == nullptr) {
    return;
  }
  LAZYXLA_PJRT_ARGS(args, PJRT_Event_Await);
  args.event = event;
  PJRT_Error* error = api->PJRT_Event_Await(&args);
  destroy_event(api, event);
  check(api, error, what);
}

inline size_t on_device_nbytes(const PJRT_Api* api, PJRT_Buffer* raw) {
  LAZYXLA_PJRT_ARGS(args, PJRT_Buffer_OnDeviceSizeInBytes);
  args.buffer = raw;
  LAZYXLA_PJRT_CALL(api, PJRT_Buffer_OnDeviceSizeInBytes, args);
  return args.on_device_size_in_bytes;
}

inline void destroy_buffer(const PJRT_Api* api, PJRT_Buffer* raw) {
  LAZYXLA_PJRT_ARGS(args, PJRT_Buffer_Destroy);
  args.buffer = raw;
  ignore_error(api, api->PJRT_Buffer_Destroy(&args));
}

}  // namespace lazyxla::pjrt
