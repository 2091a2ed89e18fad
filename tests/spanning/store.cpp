#include "store.h"

#include "call.h"

namespace spanning {
namespace {

PJRT_CallbackError callback_error = &make_callback_error;

// Copies what a callback returned, and frees it as the callback asks.
template <typename Args>
std::string take_value(Args& args) {
  std::string value(args.value, args.value_size);
  args.value_deleter_callback(args.value);
  return value;
}

}  // namespace

Store::Store(const PJRT_Client_Create_Args& args)
    : get_(args.kv_get_callback),
      put_(args.kv_put_callback),
      get_arg_(args.kv_get_user_arg),
      put_arg_(args.kv_put_user_arg) {
  if (SPANNING_HAS(&args, PJRT_Client_Create_Args, kv_try_get_user_arg)) {
    try_get_ = args.kv_try_get_callback;
    try_get_arg_ = args.kv_try_get_user_arg;
  }
}

std::string Store::get(const std::string& key, int timeout_ms) const {
  SPANNING_ARGS(args, PJRT_KeyValueGetCallback);
  args.key = key.data();
  args.key_size = key.size();
  args.timeout_in_ms = timeout_ms;
  args.callback_error = &callback_error;
  args.user_arg = get_arg_;
  check(get_(&args));
  return take_value(args);
}

bool Store::has(const std::string& key) const {
  if (try_get_ == nullptr) return false;
  SPANNING_ARGS(args, PJRT_KeyValueTryGetCallback);
  args.key = key.data();
  args.key_size = key.size();
  args.callback_error = &callback_error;
  args.user_arg = try_get_arg_;
  PJRT_Error* error = try_get_(&args);
  if (error == nullptr) {
    take_value(args);
    return true;
  }
  if (code_of(error) != PJRT_Error_Code_NOT_FOUND) throw Failure{error};
  destroy(error);
  return false;
}

void Store::put(const std::string& key, const std::string& value) const {
  SPANNING_ARGS(args, PJRT_KeyValuePutCallback);
  args.key = key.data();
  args.key_size = key.size();
  args.value = value.data();
  args.value_size = value.size();
  args.callback_error = &callback_error;
  args.user_arg = put_arg_;
  check(put_(&args));
}

void Store::clear(const std::string& key) {
  if (!overwrites_) return;
  if (PJRT_Error* error = guarded([&] { put(key, "-"); })) {
    overwrites_ = false;
    destroy(error);
  }
}

}  // namespace spanning
