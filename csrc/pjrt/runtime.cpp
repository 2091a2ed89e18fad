#include "pjrt/runtime.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "common/fork.h"
#include "pjrt/disposal.h"
#include "pjrt/error.h"
#include "pjrt/exit.h"
#include "pjrt/host_memory.h"
#include "pjrt/host_threads.h"

namespace lazyxla::pjrt {

namespace {

std::unique_ptr<Client> start(const PluginSpec& spec, const Processes& processes) {
  try {
    auto client = Client::create(Plugin::load(spec.path), spec.create_options, spec.compile_options,
                                 processes);
    if (client->devices().empty()) {
      throw Error(PJRT_Error_Code_FAILED_PRECONDITION,
                  "the plugin " + spec.path +
                      " has no devices; what it was started with is LAZYXLA_CREATE_OPTIONS "
                      "(setting create_options)");
    }
    return client;
  } catch (const Error& error) {
    if (spec.hint.empty()) throw;
    throw Error(error.code(), error.what() + (". " + spec.hint));
  }
}

std::atomic<bool> without_destructors{false};
std::atomic<void (*)()> called_at_exit{nullptr};

// Waits until the devices have done all their work. False if that wait was given up, since they may
// wait for processes that are gone.
bool finish_work() {
  try {
    for (const Device& device : Runtime::get().client().devices()) {
      try {
        device.await();
      } catch (const Error&) {  // the process ends: there is no one to report it to
      }
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Runs before static variables are destroyed, also those of the plugin and of PyTorch, which
// running programs still use.
void at_exit(int status, void*) {
  if (forked()) {
    return;
  }
  const bool is_over = !without_destructors && finish_work();
  if (const auto function = called_at_exit.load()) function();
  if (is_over) return finish_disposal();
  std::fflush(nullptr);
  _exit(status);
}

}  // namespace

void prepare_to_exit(bool busy) {
  if (!Runtime::get().initialized()) return;
  // What is registered last runs first. LLVM and oneDNN, for example, make their static variables
  // when a program needs them, long after the client was started: so this waits for all programs.
  without_destructors = busy || !finish_work();
  on_exit(at_exit, nullptr);
}

void call_at_exit(void (*function)()) { called_at_exit = function; }

Runtime& Runtime::get() {
  static auto& runtime = *new Runtime();  // never destroyed, see the header
  return runtime;
}

void Runtime::set_plugin_provider(std::function<PluginSpec()> provider) {
  std::lock_guard lock(mutex_);
  provider_ = std::move(provider);
}

void Runtime::set_processes(Processes processes) {
  check_not_forked();
  std::lock_guard lock(mutex_);
  if (initialized()) {
    throw Error(PJRT_Error_Code_FAILED_PRECONDITION,
                "the devices are in use already, by this process alone; call "
                "torch.distributed.init_process_group before anything that uses them");
  }
  processes_ = std::move(processes);
}

void Runtime::set_host_handler(std::string name, Handler* handler) {
  std::lock_guard lock(mutex_);
  handler_name_ = std::move(name);
  handler_ = handler;
}

bool Runtime::takes_host_handler() {
  client();
  return takes_host_handler_;
}

Client& Runtime::client() {
  check_not_forked();  // before the mutex, which a thread of the parent may have held
  if (Client* client = client_.load(std::memory_order_acquire)) [[likely]] {
    return *client;
  }
  std::function<PluginSpec()> provider;
  {
    std::lock_guard lock(mutex_);
    provider = provider_;
  }
  if (!provider) {
    throw Error(PJRT_Error_Code_FAILED_PRECONDITION,
                "no PJRT plugin was chosen: Runtime::set_plugin_provider has not been called");
  }
  // Outside the mutex: the provider may want the GIL, whose holder may be waiting for the mutex.
  PluginSpec spec = provider();

  std::lock_guard lock(mutex_);
  if (Client* client = client_.load(std::memory_order_acquire)) {
    return *client;  // another thread was faster
  }
  std::unique_ptr<Client> client = start(spec, processes_);
  platform_ = spec.platform.empty() ? client->platform_name() : std::move(spec.platform);
  if (client->platform_name() == "cpu") {
    keep_freed_memory(reinterpret_cast<const void*>(client->api().PJRT_Client_Create));
    yield_compute_threads();
  }
  takes_host_handler_ = handler_ && platform_ == "cpu" &&
                        register_handler(client->api(), platform_, handler_name_, handler_);
  client_.store(client.get(), std::memory_order_release);
  on_exit(at_exit, nullptr);  // after the plugin was loaded: so it runs before the plugin's
  return *client.release();
}

const std::string& Runtime::platform() {
  client();
  return platform_;
}

}  // namespace lazyxla::pjrt
