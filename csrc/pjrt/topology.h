// A topology: devices known by description, to compile for.
//
// A plugin makes one from a name in a notation of its own, for TPUs the generation and the chips in
// each direction; none of them needs to be attached. Or it describes the devices of a running
// client. Nothing runs on it: what it compiles is loaded by a Client, on another machine
// (CompiledProgram::serialize, Client::deserialize), or is only used to find out whether the
// compiler accepts the program, and what memory and time it needs.
//
//   auto topology = Topology::create(Plugin::load("/.../libtpu.so"), "v5e:2x2");
//   auto program = topology->compile(module, "mlir", {});
//   program->memory_stats()->peak;
//
// The platform of a client's topology is described as by the plugin for a topology made by name,
// where it can: both are read by the same functions.
//
// A Topology outlives the programs it compiled. All functions may be called from several threads at
// once.
#pragma once

#include <pjrt_c_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/fork.h"
#include "pjrt/compiled_program.h"
#include "pjrt/plugin.h"

namespace lazyxla::pjrt {

class Client;

class Topology {
 public:
  // `options` are the plugin's own. Throws the plugin's error for a name it does not know.
  static std::unique_ptr<Topology> create(const Plugin& plugin, const std::string& name,
                                          const NamedValues& options = {});

  // That of the client, which outlives it; its devices are the addressable ones.
  static std::unique_ptr<Topology> of(const Client& client);

  ~Topology();
  Topology(const Topology&) = delete;
  Topology& operator=(const Topology&) = delete;

  const Plugin& plugin() const { return plugin_; }
  const std::string& platform_name() const { return platform_name_; }  // "tpu"
  const std::string& platform_version() const { return platform_version_; }
  const std::vector<DeviceDescription>& devices() const { return devices_; }

  // How many processes the client spans.
  int processes() const;

  // As Client::compile, for one device of the topology.
  std::shared_ptr<const CompiledProgram> compile(std::string_view code, std::string_view format,
                                                 const CompileOptions& options) const;

  // As Client::check_options.
  void check_options(const CompileOptions& options) const;
  const CompileOptions& compile_options() const;

 private:
  explicit Topology(const Plugin& plugin) : plugin_(plugin) {}
  void start(const std::string& name, const NamedValues& options);
  void describe_platform();

  ClientStarted started_;  // the compiler's threads do not survive a fork either
  const Plugin& plugin_;
  const Client* client_ = nullptr;           // whose topology it is, or null
  PJRT_TopologyDescription* raw_ = nullptr;  // the client's own, if it has one, or this object's
  std::string platform_name_;
  std::string platform_version_;
  std::vector<DeviceDescription> devices_;
};

}  // namespace lazyxla::pjrt
