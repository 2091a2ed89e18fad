// The process-wide runtime: one plugin and one client, started on first use.
//
// `import lazyxla` only installs the plugin provider; the first `client()` asks it which plugin to
// load and starts the devices. If that fails the error is thrown to whoever asked, and the next
// call tries again.
//
// The client is never destroyed: buffers held by Python objects or static variables may outlive any
// order of destruction we could choose, and the operating system frees the devices anyway.
//
// Forking. A client's threads and device handles do not survive fork(). In a child forked after the
// client was started (or while it was starting) every use throws an Error that says so, and
// destructors leave the plugin alone.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

#include "client.h"
#include "plugin.h"

namespace lazyxla::pjrt {

class Runtime {
 public:
  static Runtime& get();

  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // How `client()` learns which plugin to start; no effect once it has. The provider is called
  // without any lock of ours held, perhaps more than once: it may take the GIL.
  void set_plugin_provider(std::function<PluginSpec()> provider);

  // The client, started if need be. Thread-safe.
  Client& client();

  const Plugin& plugin() { return client().plugin(); }

  // "cpu", "cuda" or "tpu": the provider's word, or else the client's.
  const std::string& platform();

  int device_count() { return static_cast<int>(client().devices().size()); }

  // Whether the client is running. Starts nothing, throws nothing.
  bool initialized() const { return client_.load(std::memory_order_acquire) != nullptr; }

 private:
  Runtime() = default;

  std::mutex mutex_;  // guards the provider and the start of the client
  std::function<PluginSpec()> provider_;
  std::string platform_;  // constant once client_ is set
  std::atomic<Client*> client_{nullptr};
};

}  // namespace lazyxla::pjrt
