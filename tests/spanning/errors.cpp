#include <memory>
#include <mutex>
#include <unordered_map>

#include "call.h"

namespace spanning {
namespace {

struct OwnError {
  PJRT_Error_Code code;
  std::string message;
};

// Both plugins' errors come as PJRT_Error*, so those made here are known by their address.
std::mutex mutex;
std::unordered_map<const PJRT_Error*, std::unique_ptr<OwnError>> own_errors;

const OwnError* own(const PJRT_Error* error) {
  std::lock_guard lock(mutex);
  const auto found = own_errors.find(error);
  return found == own_errors.end() ? nullptr : found->second.get();
}

void error_message(PJRT_Error_Message_Args* args) {
  const OwnError* error = own(args->error);
  if (error == nullptr) return cpu()->PJRT_Error_Message(args);
  args->message = error->message.data();
  args->message_size = error->message.size();
}

PJRT_Error* error_get_code(PJRT_Error_GetCode_Args* args) {
  const OwnError* error = own(args->error);
  if (error == nullptr) return cpu()->PJRT_Error_GetCode(args);
  args->code = error->code;
  return nullptr;
}

void error_destroy(PJRT_Error_Destroy_Args* args) {
  {
    std::lock_guard lock(mutex);
    if (own_errors.erase(args->error) > 0) return;
  }
  cpu()->PJRT_Error_Destroy(args);
}

}  // namespace

PJRT_Error* make_error(PJRT_Error_Code code, const std::string& message) {
  auto made = std::make_unique<OwnError>(OwnError{code, message});
  auto* error = reinterpret_cast<PJRT_Error*>(made.get());
  std::lock_guard lock(mutex);
  own_errors.emplace(error, std::move(made));
  return error;
}

PJRT_Error* make_callback_error(PJRT_Error_Code code, const char* message, size_t size) {
  return make_error(code, std::string(message, size));
}

PJRT_Error_Code code_of(const PJRT_Error* error) {
  SPANNING_ARGS(args, PJRT_Error_GetCode);
  args.error = error;
  PJRT_Error* failure = error_get_code(&args);
  if (failure == nullptr) return args.code;
  destroy(failure);
  return PJRT_Error_Code_UNKNOWN;
}

std::string message_of(const PJRT_Error* error) {
  SPANNING_ARGS(args, PJRT_Error_Message);
  args.error = error;
  error_message(&args);
  return std::string(args.message, args.message_size);
}

void destroy(PJRT_Error* error) {
  SPANNING_ARGS(args, PJRT_Error_Destroy);
  args.error = error;
  error_destroy(&args);
}

void wrap_errors(PJRT_Api& api) {
  api.PJRT_Error_Message = &error_message;
  api.PJRT_Error_GetCode = &error_get_code;
  api.PJRT_Error_Destroy = &error_destroy;
}

}  // namespace spanning
