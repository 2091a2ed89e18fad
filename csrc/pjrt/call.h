// Calling the C API, for this directory's .cpp files only. Every PJRT function takes one struct
// that states its own size, so that plugin and caller may be of different age:
//
//   LAZYXLA_PJRT_QUERY(args, api, PJRT_Buffer_ElementType, buffer, raw);   // throws Error
//   return args.type;
//
// and, where there are more arguments,
//
//   LAZYXLA_PJRT_ARGS(args, PJRT_Buffer_CopyToDevice, buffer, raw);
//   args.dst_device = device;
//   LAZYXLA_PJRT_CALL(api, PJRT_Buffer_CopyToDevice, args);
#pragma once

#include "pjrt/error.h"
#include "pjrt/shared_client.h"

// Declares `name`, the argument struct of `function`, zeroed but for one field.
#define LAZYXLA_PJRT_ARGS(name, function, field, value) \
  function##_Args name{};                               \
  name.struct_size = function##_Args_STRUCT_SIZE;       \
  name.field = value

#define LAZYXLA_PJRT_CALL(api, function, args) \
  ::lazyxla::pjrt::check((api), (api)->function(&(args)), #function)

// Declares the struct and makes the call.
#define LAZYXLA_PJRT_QUERY(name, api, function, field, value) \
  LAZYXLA_PJRT_ARGS(name, function, field, value);            \
  LAZYXLA_PJRT_CALL(api, function, name)

namespace lazyxla::pjrt {

// Frees an error that is not reported: of a destructor, or of a query whose failure means "not
// offered".
inline bool ignore_error(const PJRT_Api* api, PJRT_Error* error) {
  if (error == nullptr) {
    return false;
  }
  LAZYXLA_PJRT_ARGS(args, PJRT_Error_Destroy, error, error);
  api->PJRT_Error_Destroy(&args);
  return true;
}

inline void destroy_event(const PJRT_Api* api, PJRT_Event* event) {
  if (event != nullptr) {
    LAZYXLA_PJRT_ARGS(args, PJRT_Event_Destroy, event, event);
    ignore_error(api, api->PJRT_Event_Destroy(&args));
  }
}

// Whether it has happened, or failed.
inline bool is_ready(const PJRT_Api* api, PJRT_Event* event) {
  LAZYXLA_PJRT_ARGS(args, PJRT_Event_IsReady, event, event);
  return ignore_error(api, api->PJRT_Event_IsReady(&args)) || args.is_ready;
}

inline PJRT_Event* ready_event(const PJRT_Api* api, PJRT_Buffer* raw) {
  LAZYXLA_PJRT_QUERY(args, api, PJRT_Buffer_ReadyEvent, buffer, raw);
  return args.event;
}

// Waits until `event` has happened, whether or not it failed; an interrupt (common/waiting.h) ends
// that.
void wait_for_event(const PJRT_Api* api, PJRT_Event* event);

// Waits for `event`, frees it, and throws the failure it carries. A null event has happened
// already. Not interruptible: the plugin may be writing to the caller's memory.
void await_copy(const PJRT_Api* api, PJRT_Event* event, std::string_view what);

// The same, but an interrupt ends it.
void await_event(const PJRT_Api* api, PJRT_Event* event, std::string_view what);

inline size_t on_device_nbytes(const PJRT_Api* api, PJRT_Buffer* raw) {
  LAZYXLA_PJRT_QUERY(args, api, PJRT_Buffer_OnDeviceSizeInBytes, buffer, raw);
  return args.on_device_size_in_bytes;
}

// The handle of an argument of an execution. Throws if an earlier one has taken its memory.
PJRT_Buffer* handle_of(const Buffer& argument, size_t position);

// Whether an execution has taken the memory.
inline bool is_taken(const PJRT_Api* api, PJRT_Buffer* raw) {
  LAZYXLA_PJRT_ARGS(args, PJRT_Buffer_IsDeleted, buffer, raw);
  return !ignore_error(api, api->PJRT_Buffer_IsDeleted(&args)) && args.is_deleted;
}

inline void destroy_buffer(const PJRT_Api* api, PJRT_Buffer* raw) {
  if (let_go(raw)) return;
  LAZYXLA_PJRT_ARGS(args, PJRT_Buffer_Destroy, buffer, raw);
  ignore_error(api, api->PJRT_Buffer_Destroy(&args));
}

}  // namespace lazyxla::pjrt
