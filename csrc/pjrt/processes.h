// The processes of one client: where it spans several, each addresses some of its devices.
//
// The clients of TPUs and GPUs span processes; those of one host or many meet at a key-value store
// that their launcher provides. The CPU's does not: there `Client::spans_processes` is always
// false.
#pragma once

#include <pjrt_c_api.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>

namespace lazyxla::pjrt {

// A key-value store. Its functions may be called from several threads at once. Every exception that
// they throw is passed to the plugin as an error.
struct KeyValueStore {
  std::function<void(const std::string& key, const std::string& value)> put;
  std::function<std::optional<std::string>(const std::string& key)> try_get;

  // Waits until there is a value. Throws Error with DEADLINE_EXCEEDED.
  std::string get(const std::string& key, std::chrono::milliseconds timeout) const;
};

struct Processes {
  int index = 0;  // this one, of `count`
  int count = 1;
  std::optional<KeyValueStore> store{};  // that they share; none for one
  std::chrono::milliseconds timeout{0};  // how long to wait for the others
};

// Hands the store to the plugin, which may call it as long as its client lives: `store` must, too.
void add_store(PJRT_Client_Create_Args& args, KeyValueStore& store);

}  // namespace lazyxla::pjrt
