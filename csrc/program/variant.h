// Variants: the compiled forms of programs (program.h).
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ir/node.h"
#include "pjrt/executable.h"
#include "program/host_program.h"
#include "program/partition.h"
#include "program/program_store.h"
#include "program/scalars.h"

namespace lazyxla::program {

class Apart;
struct Replicas;
struct StageProgram;

// What processes compare before they launch a program together: it must be the same.
struct Identity {
  uint64_t hash = 0;
  uint64_t without_numbers = 0;        // of all but the constants; 0 if none can be an input
  std::vector<std::string> operators;  // "aten::mul.Tensor Float[4, 4]"
};

// One compiled form of a program, perhaps still being compiled. That of a graph that was cut has
// its stages' programs instead of an executable; a small one may have the host's.
struct Variant {
  ScalarPlan scalars;
  std::vector<uint32_t> float_slots;  // its inputs: one f64 array, one i64 array
  std::vector<uint32_t> int_slots;
  std::string line;  // the user's that it was compiled for
  std::vector<StageProgram> stages;
  size_t handed_on = 0;                        // values that only stages hand on
  bool is_trial = false;                       // a compiled one will replace it, or a stage's
  std::shared_ptr<const Partition> partition;  // of a program for many devices, else null
  std::shared_ptr<const Replicas> replicas;    // of one that several processes run, else null
  std::shared_ptr<Apart> apart;                // if its one stage is such a whole graph's
  std::unique_ptr<const Identity> identity;    // of one for those of several processes, else null
  Variant();
  ~Variant();

  // How many programs it counts as where their number is bounded. Of each operator a program keeps
  // code and more, tens of kilobytes.
  int64_t size() const { return size_; }
  void note_operators(int64_t operators);

  // Whether it is for these values. Not if compiling it failed: the next run that needs it tries
  // again. Nor if other processes have other numbers where it has constants: then it is replaced by
  // one in which all are inputs.
  bool matches(c10::ArrayRef<ir::ScalarValue> slots) const;
  void note_other_numbers() const { has_other_numbers_ = true; }
  bool has_other_numbers() const { return has_other_numbers_; }

  // Compiles it, and keeps it on disk, if `keep` is given.
  void compile(const std::string& artifact, const CompileOptions& options, const Keep& keep);
  // Takes a serialized executable instead. Throws pjrt::Error if the plugin does not load it.
  void load(const std::string& serialized);
  // Takes the host's program instead, which is for all values of slots.
  void take(HostProgram program, size_t slots);
  const std::optional<HostProgram>& host_program() const { return host_program_; }
  // Whether the host computes it, or a stage of it.
  bool runs_on_host() const;
  // Takes stages that are compiled instead.
  void take(std::vector<StageProgram> compiled, size_t values_handed_on);
  bool is_compiled() const { return state_.load(std::memory_order_acquire) == kCompiled; }
  // Waits while it is being compiled, even if that fails. An interrupt ends the wait.
  void await_compiled() const;
  // Waits while it is being compiled. Throws what made that fail.
  void check_compiled() const;
  const pjrt::Executable& executable() const;
  // Of a program for many devices: how its results are spread.
  const std::vector<const ir::Sharding*>& results() const { return results_; }
  // What a run needs besides its arguments: temporary memory and results, in bytes. 0 if the plugin
  // does not report it.
  int64_t bytes_needed() const { return bytes_needed_; }
  // To be called at every run. The cache compares which of two ran later.
  void note_run() const;
  int64_t last_run() const { return last_run_; }

 private:
  enum State : int { kCompiling, kCompiled, kFailed };
  std::atomic<int> state_{kCompiling};
  mutable std::atomic<int64_t> last_run_{0};
  int64_t size_ = 1;
  mutable std::atomic<bool> has_other_numbers_{false};
  void take(std::unique_ptr<pjrt::Executable> executable);
  std::unique_ptr<pjrt::Executable> executable_;
  std::optional<HostProgram> host_program_;
  std::vector<const ir::Sharding*> results_;
  int64_t bytes_needed_ = 0;
  std::exception_ptr error_;
};

using VariantRef = std::shared_ptr<const Variant>;

// A stage of a graph that was cut (cut.h). Its buffers are numbered together with those of the
// other stages: the whole's inputs, the whole's results, then what only stages hand on.
struct StageProgram {
  VariantRef variant;
  std::vector<uint32_t> inputs, outputs;
  std::vector<uint32_t> slots;  // their positions in the whole
  std::vector<int> donatable;   // those of its inputs that it may consume
};

// The size of all that there are.
int64_t size_of_variants();

}  // namespace lazyxla::program
