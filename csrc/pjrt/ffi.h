// Handlers: functions of ours that a program calls by name, through XLA's foreign function
// interface (FFI).
//
// A handler is given to a plugin once, before the programs that call it are compiled or loaded. In
// a program the call is a `stablehlo.custom_call @name` with api_version 4, whose backend_config is
// a dictionary of attributes. When the program runs, the handler is called with the operands' and
// the results' memory, on any of the plugin's threads or on the one that started the program.
//
// Before that a plugin asks each handler which version of the interface it was made for. A plugin
// silently drops a handler made for a newer version than its own, so ours answer the oldest that
// has what they use.
#pragma once

#include <pjrt_c_api.h>

#include <exception>
#include <stdexcept>
#include <string>

#include "pjrt/error.h"

struct XLA_FFI_CallFrame;  // of xla/ffi/api/c_api.h, for those who write handlers
struct XLA_FFI_Error;

namespace lazyxla::pjrt {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

// Makes `handler` known to a plugin for the CPU, or for CUDA, as `name`. False if the plugin takes
// no handlers; throws Error if it refuses this one.
bool register_handler(const PJRT_Api& api, const std::string& platform, const std::string& name,
                      Handler* handler);

// The same for another library's handler, which may have been made for a newer version than the
// plugin's. The versions so far only differ in what they add. Throws Error if the name has another
// handler, or if there are too many.
bool register_foreign_handler(const PJRT_Api& api, const std::string& platform,
                              const std::string& name, Handler* handler);

// Answers the version query. Every handler calls it first, and returns null at once if it is true:
// the call was only that query.
bool answer_version(const XLA_FFI_CallFrame& frame);

// The error that a handler returns to make the execution fail with `message`.
XLA_FFI_Error* handler_error(const XLA_FFI_CallFrame& frame, const std::string& message,
                             PJRT_Error_Code code = PJRT_Error_Code_INVALID_ARGUMENT);

// A handler that calls `function`, whose exceptions are the execution's error. That of a
// std::domain_error has the code kOutsideDomain (error.h).
template <void (*function)(const XLA_FFI_CallFrame&)>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  if (answer_version(*frame)) return nullptr;
  try {
    function(*frame);
    return nullptr;
  } catch (const std::domain_error& error) {
    return handler_error(*frame, error.what(), kOutsideDomain);
  } catch (const std::exception& error) {
    return handler_error(*frame, error.what());
  }
}

}  // namespace lazyxla::pjrt
