// Tape: a record of a flush, for running its program again (steps/step_program.h).
//
// While a thread has a tape, each of its flushes leaves a note: the program, which leaves it took
// and which storages got its results. A tape describes one flush; further ones are only counted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph/walk.h"
#include "program/program.h"

namespace lazyxla::graph {

class Tape {
 public:
  // A storage that got a result.
  struct Written {
    uint64_t id;
    uint32_t output;
    const ir::Sharding* sharding;  // the storage's
  };

  // The pair of slots that holds a random operator's key.
  struct Random {
    uint32_t seed, ordinal;  // their positions
    uint64_t drawn;          // which number of the flush's draws it was
  };

  // The calling thread's, or null.
  static Tape* current() { return current_; }

  Tape() = default;
  ~Tape() { stop(); }
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  // Throws if the thread has another one.
  void start();
  void stop();

  // To be called by a flush, before its graph is consumed.
  void take(const program::Graph& graph, const program::VariantRef& variant);

  int flushes = 0;
  std::string problem;  // why the flush cannot be run again; empty if it can
  program::VariantRef variant;
  std::vector<const ir::Node*> leaves;  // their addresses only
  std::vector<ir::TensorType> leaf_types, output_types;
  std::vector<const ir::Sharding*> leaf_shardings;  // null: it is on one device
  std::vector<int> aliases;                         // per leaf, as in Graph
  std::vector<Written> written;
  std::vector<ir::ScalarValue> slots;
  std::vector<Random> random;
  c10::intrusive_ptr<c10::GeneratorImpl> generator;  // null if nothing was drawn
  uint64_t draws = 0;

 private:
  void take_draws(const program::Graph& graph);

  inline static thread_local Tape* current_ = nullptr;
};

}  // namespace lazyxla::graph
