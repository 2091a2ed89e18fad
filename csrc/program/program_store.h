// The program store: compiled programs on disk, so that the next process compiles nothing.
// lazyxla/cache/program_store.py defines what is kept, and by which keys; programs that are new to
// the process ask it, on workers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "program/graph.h"

namespace lazyxla::program {

// Keeps a serialized executable; a NeedsInterpreter (workers.h) exists meanwhile. Null if it is not
// to be kept.
using Keep = std::function<void(const std::string& executable)>;

// What is kept of one graph.
class StoredGraph {
 public:
  struct Found {
    std::string executable;  // serialized
    std::vector<bool> variable;
    std::vector<uint32_t> static_slots;
  };
  struct Added {
    std::optional<std::string> executable;  // if it is there already
    Keep keep;
  };

  virtual ~StoredGraph() = default;
  // Whether any program is kept, for any scalars.
  virtual bool is_kept() = 0;
  // The program for these scalars, of which the `needed` ones must be its inputs if they can.
  virtual std::optional<Found> find(const std::vector<bool>& wanted,
                                    const std::vector<bool>& needed,
                                    const std::vector<ir::ScalarValue>& slots) = 0;
  // Why it was not found, as the end of a sentence; or empty.
  virtual std::string explain_miss() = 0;
  // Records that the graph's program is that of this artifact.
  virtual Added add(const std::vector<bool>& wanted, const std::vector<ir::ScalarValue>& slots,
                    const std::vector<uint32_t>& static_slots, const std::string& artifact) = 0;
};

// Returns what is kept of the graph of this portable key (graph.h) and these compile
// options, as PJRT takes them. Null if nothing is kept at all.
using ProgramStore = std::function<std::unique_ptr<StoredGraph>(
    const std::optional<std::string>& key, const std::string& options)>;

// Set once, by the bindings.
inline auto& program_store = *new ProgramStore();

}  // namespace lazyxla::program
