#include "pjrt/ffi.h"

#include <xla/ffi/api/c_api.h>

#include <array>
#include <atomic>
#include <unordered_map>
#include <utility>

#include "common/compat.h"
#include "common/locks.h"
#include "pjrt/call.h"
#include "pjrt/error.h"

namespace lazyxla::pjrt {
namespace {

constexpr int kMajor = 0;
constexpr int kMinor = 2;

// The plugin's FFI extension, as XLA's pjrt_c_api_ffi_extension.h has it; the wheel that gives us
// the PJRT header does not bring that one.
struct RegisterHandlerArgs {
  size_t struct_size;
  const char* target_name;
  size_t target_name_size;
  void* handler;
  const char* platform_name;
  size_t platform_name_size;
  uint32_t traits;
};

struct FfiExtension {
  PJRT_Extension_Base base;
  void* type_register;
  void* user_data_add;
  PJRT_Error* (*register_handler)(RegisterHandlerArgs* args);
};

const FfiExtension* find_extension(const PJRT_Api& api) {
  const PJRT_Extension_Base* extension = api.extension_start;
  while (extension && extension->type != PJRT_Extension_Type_FFI) extension = extension->next;
  if (!extension || extension->struct_size < sizeof(FfiExtension)) return nullptr;
  return reinterpret_cast<const FfiExtension*>(extension);
}

// Handlers of other libraries. A handler is a bare function, so each of them has a function here
// that knows its number, answers the version query, and passes all else on.
constexpr size_t kMostForeign = 512;
std::array<std::atomic<Handler*>, kMostForeign> foreign;

template <size_t number>
XLA_FFI_Error* pass_on(XLA_FFI_CallFrame* frame) {
  if (answer_version(*frame)) return nullptr;
  return foreign[number].load(std::memory_order_acquire)(frame);
}

template <size_t... numbers>
constexpr std::array<Handler*, kMostForeign> passers(std::index_sequence<numbers...>) {
  return {&pass_on<numbers>...};
}

}  // namespace

bool register_foreign_handler(const PJRT_Api& api, const std::string& platform,
                              const std::string& name, Handler* handler) {
  static constexpr auto kPassers = passers(std::make_index_sequence<kMostForeign>());
  static auto& all = *new Guarded<std::unordered_map<std::string, Handler*>>();
  const auto known = all.hold();
  if (const auto found = known->find(name); found != known->end()) {
    if (found->second == handler) return true;
    throw Error(PJRT_Error_Code_ALREADY_EXISTS, name + " is the name of another function");
  }
  const size_t number = known->size();
  if (number == kMostForeign) {
    throw Error(PJRT_Error_Code_RESOURCE_EXHAUSTED,
                std::to_string(kMostForeign) + " functions are known already");
  }
  foreign[number].store(handler, std::memory_order_release);
  if (!register_handler(api, platform, name, kPassers[number])) return false;
  known->emplace(name, handler);
  return true;
}

bool register_handler(const PJRT_Api& api, const std::string& platform, const std::string& name,
                      Handler* handler) {
  const FfiExtension* extension = find_extension(api);
  if (!extension || !extension->register_handler) return false;
  const std::string where = platform == "cuda" ? "CUDA" : "Host";
  RegisterHandlerArgs args{sizeof(RegisterHandlerArgs),
                           name.data(),
                           name.size(),
                           reinterpret_cast<void*>(handler),
                           where.data(),
                           where.size(),
                           0};
  check(&api, extension->register_handler(&args), "registering the handler " + name);
  return true;
}

bool answer_version(const XLA_FFI_CallFrame& frame) {
  const compat::FfiExtension* extension = frame.extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata* metadata =
      reinterpret_cast<const XLA_FFI_Metadata_Extension*>(extension)->metadata;
  metadata->api_version.major_version = kMajor;
  metadata->api_version.minor_version = kMinor;
  metadata->traits = 0;
  return true;
}

XLA_FFI_Error* handler_error(const XLA_FFI_CallFrame& frame, const std::string& message,
                             PJRT_Error_Code code) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message.c_str(),
                                 static_cast<XLA_FFI_Error_Code>(code)};  // both are absl's
  return frame.api->XLA_FFI_Error_Create(&args);
}

}  // namespace lazyxla::pjrt
