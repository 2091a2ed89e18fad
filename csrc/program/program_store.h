// The program store: compiled programs on disk, so that the next process compiles nothing.
//
// Two kinds of entries (disk_cache.h), each found by all that it depends on:
//
//     kind      key                                       bytes
//     program   StableHLO, compile options, environment   the serialized executable
//     graph     portable key, options, environment        its forms: which scalars are inputs, the
//                                                         others' values, and the program of each
//                                                         by its name, a checksum of its key
//
// With its graph known a program is loaded without lowering it; with its program known (a graph of
// torch.compile's, an operator with a user's rule) it is lowered, but not compiled. Another
// environment (environment.h) finds nothing. Its text is the key of an empty entry, too, which
// nobody needs to find programs: by it a program that is there for another environment can be told
// from one that is not there at all.
//
// A form serves a graph if the scalars that are no inputs have the graph's values. Which of them
// are inputs is a guess when a graph is new to the process (scalars.h), from what ran before; any
// form that serves is then good, whoever made it. So programs that were compiled without what a
// process runs before them, by a capture (record/capture.h) for example, are found all the same.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "program/disk_cache.h"
#include "program/environment.h"
#include "program/graph.h"

namespace lazyxla::graph {

class ProgramStore {
 public:
  struct Settings {
    std::string directory;  // in the cache directory; made if need be. Empty: no store
    int64_t max_bytes = 0;
    Fields version;                 // of the lowering
    bool lowering_is_known = true;  // that version tells all; else only programs are looked up
  };

  // What a graph needs to be run: the executable, which scalars are its inputs, and which cannot
  // be.
  struct Found {
    std::string executable;
    std::vector<bool> variable;
    std::vector<uint32_t> static_slots;
  };

  // `environment` is that of the programs in question.
  ProgramStore(Settings settings, std::string environment);

  // That of the programs that run here.
  static std::shared_ptr<ProgramStore> current();
  // Who tells its settings. Asked at the first miss, and again after `forget_settings`.
  static void set_provider(std::function<Settings()> provider);
  static void forget_settings();

  // The key of a graph that is compiled with `options` (as PJRT takes them); empty if such a graph
  // cannot be kept. `key` is its portable key (portable_key.h).
  EntryKey graph_key(const Graph& graph, const std::string& options) const;
  EntryKey graph_key(const std::optional<std::string>& key, const std::string& options) const;
  EntryKey program_key(const std::string& artifact, const std::string& options) const;

  // The program of a graph of this key with these scalars, of which the `needed` ones must be its
  // inputs if they can. If several serve, one whose inputs are exactly the `wanted` ones; else one
  // with the most.
  std::optional<Found> find_graph(const EntryKey& key, const std::vector<bool>& wanted,
                                  const std::vector<bool>& needed,
                                  c10::ArrayRef<ir::ScalarValue> slots);
  // Whether there is one, for whatever scalars.
  bool has_programs(const EntryKey& graph);
  // The serialized executable.
  std::optional<std::string> find_program(const EntryKey& key);

  // False if it could not be written. `wanted` are the inputs as they were asked for: those that
  // are static are none. `program` is the program's name.
  bool add_graph(const EntryKey& key, const std::vector<bool>& wanted,
                 c10::ArrayRef<ir::ScalarValue> slots, const std::vector<uint32_t>& static_slots,
                 const std::string& program);
  bool add_program(const EntryKey& key, const std::string& executable);

  // Why a graph that is new to the process was not found, as the end of a sentence: it is there for
  // other numbers, or for another environment; else empty. That nothing at all is for this
  // environment is told once.
  std::string explain_miss(const Graph& graph, const std::string& options);

 private:
  void add_environment();
  const std::vector<std::string>& other_environments();
  std::string explain(const std::string& whose, const std::string& other) const;

  const Settings settings_;
  const std::string environment_;
  DiskCache cache_;
  std::once_flag environment_added_, environments_read_;
  std::vector<std::string> other_environments_;
  std::atomic<bool> nothing_is_ours_{false};  // and it was not told yet
};

}  // namespace lazyxla::graph
