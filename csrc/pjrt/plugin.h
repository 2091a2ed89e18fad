// A PJRT plugin: a shared library that exports `GetPjrtApi` and thereby one kind of device.
//
// Loading opens the library, checks that its API is compatible and initialises it; no device is
// touched until a Client is created. A plugin is loaded at most once per path and never unloaded
// (its threads and static objects do not survive that), so a `const Plugin&` is valid for as long
// as the process.
//
// The C API only ever grows at its end. A plugin older than our header lacks the newest functions
// (see `has`); one newer than our header knows from the struct sizes we pass which fields we do not
// know. Only the major version must be the same.
//
//   const Plugin& plugin = Plugin::load("/.../xla_cpu_pjrt.so");
//   auto client = Client::create(plugin, {{"cpu_device_count", 2}});
#pragma once

#include <pjrt_c_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/options.h"

namespace lazyxla::pjrt {

// PJRT's "named values": how a plugin takes options and gives attributes.
using NamedValue = std::variant<bool, int64_t, float, std::string, std::vector<int64_t>>;
using NamedValues = std::map<std::string, NamedValue>;

NamedValues read_named_values(const PJRT_NamedValue* values, size_t count);

// The result points into `values`, which must outlive it.
std::vector<PJRT_NamedValue> to_named_values(const NamedValues& values);

// What the plugin reports of a device, attached (client.h) or not (topology.h).
struct DeviceDescription {
  int64_t id = 0;             // unique among all processes
  int64_t process_index = 0;  // the process (on TPUs: the host) that would own it
  std::string kind;           // the model, for example "TPU v5 lite"
  NamedValues attributes;     // the plugin's own, on TPUs for example "coords"
};

DeviceDescription describe(const PJRT_Api* api, PJRT_DeviceDescription* raw);

// Which plugin to load and how to start its client.
struct PluginSpec {
  std::string path;
  std::string platform;  // "cpu", "cuda" or "tpu"; "": the name that the client reports
  NamedValues create_options;
  std::map<std::string, CompileOptions> compile_options;  // see Client::create
  std::string hint;  // what to check if the devices do not start
};

class Plugin {
 public:
  // Loads the plugin at `path`, or returns the one already loaded from there. Thread-safe. A
  // failure is not remembered: the next call tries again.
  static const Plugin& load(const std::string& path);

  Plugin(const Plugin&) = delete;
  Plugin& operator=(const Plugin&) = delete;

  const PJRT_Api& api() const { return *api_; }
  const std::string& path() const { return path_; }

  // (major, minor) of the PJRT C API the plugin was built with.
  std::pair<int, int> api_version() const;

  // The plugin's attributes; the two accessors below read the common ones.
  const NamedValues& attributes() const { return attributes_; }

  // The StableHLO version (major, minor, patch) that the plugin's compiler reads at most.
  std::optional<std::array<int64_t, 3>> stablehlo_current_version() const;

  std::optional<int64_t> xla_version() const;

 private:
  Plugin(std::string path, const PJRT_Api* api);

  std::string path_;
  const PJRT_Api* api_;
  NamedValues attributes_;
};

// Whether the plugin offers an optional function: has(api, &PJRT_Api::PJRT_Executable_Fingerprint).
template <typename Function>
bool has(const PJRT_Api& api, Function* PJRT_Api::* function) {
  const auto* field = reinterpret_cast<const char*>(&(api.*function));
  const size_t end = field - reinterpret_cast<const char*>(&api) + sizeof(Function*);
  return end <= api.struct_size && api.*function != nullptr;
}

}  // namespace lazyxla::pjrt
