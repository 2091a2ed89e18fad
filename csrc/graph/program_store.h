// The program store: compiled programs on disk, so that the next process compiles nothing.
//
// Two kinds of entries (disk_cache.h), each named by a checksum of all that it depends on:
//
//     program-<checksum of StableHLO, compile options, environment>    the serialized executable
//     graph-<checksum of portable key, compile options, environment,   which program a graph is,
//            which scalars are to be inputs>                           per values of the others
//
// With its graph known a program is loaded without lowering it; with its program known (a graph of
// torch.compile's, an operator with a user's rule) it is lowered, but not compiled. The environment
// is the platform, the plugin's version, the device's kind, for the CPU its instruction sets, the
// flags that compilers read, and the version of the lowering. Another version finds nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "graph/disk_cache.h"
#include "graph/walk.h"

namespace lazyxla::graph {

class ProgramStore {
 public:
  struct Settings {
    std::string directory;  // empty: no store
    int64_t max_bytes = 0;
    std::string version;            // of the lowering
    bool lowering_is_known = true;  // that version tells all; else only programs are looked up
  };

  // What a graph needs to be run: the executable, and which scalars cannot be its inputs.
  struct Found {
    std::string executable;
    std::vector<uint32_t> static_slots;
  };

  static ProgramStore& get();

  // Who tells the settings. Asked at the first miss, and again after `forget_settings`.
  void set_provider(std::function<Settings()> provider);
  void forget_settings();

  // The name of a graph whose scalars are to be inputs where `variable` says so, compiled with
  // `options` (as PJRT takes them). Empty if such a graph cannot be kept.
  std::string graph_name(const Graph& graph, const std::vector<bool>& variable,
                         const std::string& options);
  std::string program_name(const std::string& artifact, const std::string& options);

  // The program of a graph of this name with these scalars.
  std::optional<Found> find_graph(const std::string& name, const std::vector<bool>& variable,
                                  c10::ArrayRef<ir::ScalarValue> slots);
  // The serialized executable.
  std::optional<std::string> find_program(const std::string& name);

  void add_graph(const std::string& name, const std::vector<bool>& variable,
                 c10::ArrayRef<ir::ScalarValue> slots, const std::vector<uint32_t>& static_slots,
                 const std::string& program);
  void add_program(const std::string& name, const std::string& executable);

 private:
  struct Open {
    explicit Open(Settings told);
    Settings settings;
    std::string environment;
    DiskCache cache;
  };
  std::shared_ptr<Open> open();

  std::mutex mutex_;
  std::function<Settings()> provider_;
  std::shared_ptr<Open> open_;
};

}  // namespace lazyxla::graph
