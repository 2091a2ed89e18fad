// Errors of the PJRT client.
//
// A PJRT function reports failure by returning a PJRT_Error that the caller must free. `check`
// turns one into an exception, so no other code handles a PJRT_Error. Every problem this directory
// reports, be it the plugin's or our own (a missing file, a forked child), is an `Error`: callers
// catch one type and distinguish cases by `code()`. Out of device memory, for example, is
// PJRT_Error_Code_RESOURCE_EXHAUSTED.
#pragma once

#include <pjrt_c_api.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "common/fork.h"

namespace lazyxla::pjrt {

class Error : public std::runtime_error {
 public:
  Error(PJRT_Error_Code code, const std::string& message)
      : std::runtime_error(message), code_(code) {}

  PJRT_Error_Code code() const { return code_; }

 private:
  PJRT_Error_Code code_;
};

// The code of values that an operation is not defined for, such as a singular matrix to be
// inverted.
inline constexpr PJRT_Error_Code kOutsideDomain = PJRT_Error_Code_OUT_OF_RANGE;

// Frees `error` and throws it as an Error whose message is "<what>: <CODE>: <plugin's message>".
[[noreturn]] void throw_error(const PJRT_Api* api, PJRT_Error* error, std::string_view what);

// Throws unless `error` is null. `what` names the C function or what was attempted.
inline void check(const PJRT_Api* api, PJRT_Error* error, std::string_view what) {
  if (error != nullptr) [[unlikely]] {
    throw_error(api, error, what);
  }
}

[[noreturn]] void throw_forked();

// Throws in a forked child (common/fork.h); every operation that calls into the plugin begins with
// it.
inline void check_not_forked() {
  if (forked()) [[unlikely]] {
    throw_forked();
  }
}

}  // namespace lazyxla::pjrt
