// Calling the CPU plugin, and errors: its own, and those that are made here.
//
// Inside this library a failure is an exception that carries a PJRT_Error; `guarded` turns it into
// the return value that the C API wants.
#pragma once

#include <pjrt_c_api.h>

#include <exception>
#include <string>

namespace spanning {

// The CPU plugin's table of functions; null if that plugin cannot be loaded.
const PJRT_Api* cpu();

// An error of our own. The functions that read and free errors tell it from the CPU plugin's.
PJRT_Error* make_error(PJRT_Error_Code code, const std::string& message);

// What the caller's key-value callbacks make their errors with.
PJRT_Error* make_callback_error(PJRT_Error_Code code, const char* message, size_t size);

// Of either plugin's errors.
PJRT_Error_Code code_of(const PJRT_Error* error);
std::string message_of(const PJRT_Error* error);
void destroy(PJRT_Error* error);

// Puts the functions on errors into the table.
void wrap_errors(PJRT_Api& api);

struct Failure {
  PJRT_Error* error;  // owned by who catches it
};

[[noreturn]] inline void fail(PJRT_Error_Code code, const std::string& message) {
  throw Failure{make_error(code, message)};
}

inline void check(PJRT_Error* error) {
  if (error != nullptr) throw Failure{error};
}

template <typename Body>
PJRT_Error* guarded(Body body) {
  try {
    body();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.error;
  } catch (const std::exception& exception) {
    return make_error(PJRT_Error_Code_INTERNAL, exception.what());
  }
}

}  // namespace spanning

// Declares `name`, the arguments of `function`.
#define SPANNING_ARGS(name, function) \
  function##_Args name{};             \
  name.struct_size = function##_Args_STRUCT_SIZE

// Calls the CPU plugin's `function`; throws Failure.
#define SPANNING_CALL(function, args) ::spanning::check(::spanning::cpu()->function(&(args)))

// Whether the caller's struct is new enough to have `field`.
#define SPANNING_HAS(args, type, field) \
  ((args)->struct_size >= offsetof(type, field) + sizeof((args)->field))
