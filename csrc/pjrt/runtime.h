// The process-wide runtime: one plugin and one client, started on first use.
//
// `import lazyxla` only installs the plugin provider; the first `client()` asks it which plugin to
// load and starts the devices. If that fails the error is thrown to the caller, and the next call
// tries again.
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
#include <string>

#include "common/locks.h"
#include "pjrt/client.h"
#include "pjrt/ffi.h"
#include "pjrt/plugin.h"

namespace lazyxla::pjrt {

class Runtime {
 public:
  static Runtime& get();

  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Sets the source of the plugin that `client()` starts; no effect once it has. The provider is
  // called without any lock of ours held, perhaps more than once: it may take the GIL.
  void set_plugin_provider(std::function<PluginSpec()> provider);

  // The processes that the client is to span, if its plugin can: each of them must call this, and
  // start the client. Throws if this one's is started already.
  void set_processes(Processes processes);

  // A function that programs on the CPU's platform may call by this name (see ffi.h). No effect
  // once the client is started.
  void set_host_handler(std::string name, Handler* handler);

  // Whether programs may call it: the platform is the CPU's, and its plugin takes handlers.
  bool takes_host_handler();

  // The client, started if need be. Thread-safe.
  Client& client();

  const Plugin& plugin() { return client().plugin(); }

  // "cpu", "cuda" or "tpu": as the provider names it, or else the client.
  const std::string& platform();

  int device_count() { return static_cast<int>(client().devices().size()); }

  // Whether the client is running. Starts nothing, throws nothing.
  bool initialized() const { return client_.load(std::memory_order_acquire) != nullptr; }

 private:
  Runtime() = default;

  OrderedMutex mutex_;  // guards what is set before the start of the client, and the start
  std::function<PluginSpec()> provider_;
  Processes processes_;
  std::string handler_name_;
  Handler* handler_ = nullptr;
  // constant once client_ is set
  std::string platform_;
  bool takes_host_handler_ = false;
  std::atomic<Client*> client_{nullptr};
};

}  // namespace lazyxla::pjrt
