#include "pjrt/processes.h"

#include <cstring>
#include <exception>
#include <thread>

#include "common/waiting.h"
#include "pjrt/error.h"

namespace lazyxla::pjrt {
namespace {

using namespace std::chrono_literals;

constexpr auto kShortestWait = 1ms, kLongestWait = 50ms;

void free_value(char* value) { delete[] value; }

template <typename Args>
void return_value(Args& args, const std::string& value) {
  args.value = new char[value.size()];
  std::memcpy(args.value, value.data(), value.size());
  args.value_size = value.size();
  args.value_deleter_callback = &free_value;
}

// Calls `action` with the store and the key; what it throws becomes the plugin's error.
template <typename Args, typename Action>
PJRT_Error* call_store(Args* args, Action action) {
  const auto failed = [args](PJRT_Error_Code code, const char* what) {
    return (*args->callback_error)(code, what, std::strlen(what));
  };
  try {
    action(*static_cast<const KeyValueStore*>(args->user_arg),
           std::string(args->key, args->key_size));
    return nullptr;
  } catch (const Error& error) {
    return failed(error.code(), error.what());
  } catch (const std::exception& error) {
    return failed(PJRT_Error_Code_UNAVAILABLE, error.what());
  }
}

PJRT_Error* get(PJRT_KeyValueGetCallback_Args* args) {
  return call_store(args, [args](const KeyValueStore& store, const std::string& key) {
    return_value(*args, store.get(key, std::chrono::milliseconds(args->timeout_in_ms)));
  });
}

PJRT_Error* try_get(PJRT_KeyValueTryGetCallback_Args* args) {
  return call_store(args, [args](const KeyValueStore& store, const std::string& key) {
    const auto value = store.try_get(key);
    if (!value) throw Error(PJRT_Error_Code_NOT_FOUND, "there is no value of " + key);
    return_value(*args, *value);
  });
}

PJRT_Error* put(PJRT_KeyValuePutCallback_Args* args) {
  return call_store(args, [args](const KeyValueStore& store, const std::string& key) {
    store.put(key, std::string(args->value, args->value_size));
  });
}

}  // namespace

std::string KeyValueStore::get(const std::string& key, std::chrono::milliseconds timeout) const {
  const auto end = std::chrono::steady_clock::now() + timeout;
  std::chrono::milliseconds wait = kShortestWait;
  while (true) {
    if (auto value = try_get(key)) return *std::move(value);
    waiting::check_given_up();
    if (std::chrono::steady_clock::now() >= end) {
      throw Error(PJRT_Error_Code_DEADLINE_EXCEEDED, "no process has set " + key + " within " +
                                                         std::to_string(timeout.count()) + " ms");
    }
    std::this_thread::sleep_for(wait);
    wait = std::min<std::chrono::milliseconds>(wait * 2, kLongestWait);
  }
}

void add_store(PJRT_Client_Create_Args& args, KeyValueStore& store) {
  args.kv_get_callback = &get;
  args.kv_get_user_arg = &store;
  args.kv_put_callback = &put;
  args.kv_put_user_arg = &store;
  args.kv_try_get_callback = &try_get;
  args.kv_try_get_user_arg = &store;
}

}  // namespace lazyxla::pjrt
