#include "pjrt/error.h"

#include <array>

#include "pjrt/call.h"

namespace lazyxla::pjrt {

namespace {

// For example "RESOURCE_EXHAUSTED".
std::string_view code_name(PJRT_Error_Code code) {
  static constexpr std::array<std::string_view, 17> kNames = {"OK",
                                                              "CANCELLED",
                                                              "UNKNOWN",
                                                              "INVALID_ARGUMENT",
                                                              "DEADLINE_EXCEEDED",
                                                              "NOT_FOUND",
                                                              "ALREADY_EXISTS",
                                                              "PERMISSION_DENIED",
                                                              "RESOURCE_EXHAUSTED",
                                                              "FAILED_PRECONDITION",
                                                              "ABORTED",
                                                              "OUT_OF_RANGE",
                                                              "UNIMPLEMENTED",
                                                              "INTERNAL",
                                                              "UNAVAILABLE",
                                                              "DATA_LOSS",
                                                              "UNAUTHENTICATED"};
  const auto index = static_cast<size_t>(code);
  return index < kNames.size() ? kNames[index] : "UNKNOWN";
}

}  // namespace

void throw_error(const PJRT_Api* api, PJRT_Error* error, std::string_view what) {
  LAZYXLA_PJRT_ARGS(message, PJRT_Error_Message, error, error);
  api->PJRT_Error_Message(&message);

  LAZYXLA_PJRT_ARGS(code, PJRT_Error_GetCode, error, error);
  if (ignore_error(api, api->PJRT_Error_GetCode(&code))) {
    code.code = PJRT_Error_Code_UNKNOWN;
  }

  std::string text(what);
  text.append(": ");
  const std::string_view theirs(message.message, message.message_size);
  if (!theirs.starts_with(code_name(code.code))) {  // plugins mostly name it themselves
    text.append(code_name(code.code)).append(": ");
  }
  text.append(theirs);
  ignore_error(api, error);
  throw Error(code.code, text);
}

void throw_forked() {
  throw Error(PJRT_Error_Code_FAILED_PRECONDITION,
              "lazyxla was initialised before this process was forked, and its device does not "
              "survive a fork; use the spawn start method, for example "
              "torch.multiprocessing.set_start_method(\"spawn\"), or fork before the first use of "
              "the device");
}

}  // namespace lazyxla::pjrt
