// The key-value store that the processes share, through the callbacks the caller gave.
#pragma once

#include <pjrt_c_api.h>

#include <atomic>
#include <string>

namespace spanning {

class Store {
 public:
  explicit Store(const PJRT_Client_Create_Args& args);

  // Whether both callbacks that are needed were given.
  bool is_given() const { return get_ != nullptr && put_ != nullptr; }

  // The value of `key`, once it is there. Throws Failure with the store's error, as a rule after
  // `timeout_ms`.
  std::string get(const std::string& key, int timeout_ms) const;

  // Whether `key` is there now; false if no callback tells.
  bool has(const std::string& key) const;

  // Throws Failure with the store's error.
  void put(const std::string& key, const std::string& value) const;

  // Frees the memory of a value that nobody reads any more, in a store that lets values be
  // overwritten: the C API has no way to delete one.
  void clear(const std::string& key);

 private:
  PJRT_KeyValueGetCallback get_ = nullptr;
  PJRT_KeyValuePutCallback put_ = nullptr;
  PJRT_KeyValueTryGetCallback try_get_ = nullptr;
  void* get_arg_ = nullptr;
  void* put_arg_ = nullptr;
  void* try_get_arg_ = nullptr;
  std::atomic<bool> overwrites_ = true;  // until the store refuses
};

}  // namespace spanning
