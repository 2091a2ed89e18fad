// Capture: recording programs without running them (lazyxla.aot).
//
// While a capture is active, nothing reaches a device. Uploads and flushes give their tensors
// leaves on *abstract* buffers (buffer.h), which have a type and no data, and every flush hands its
// graph to the capture. Graphs are cut, numbered and given donations exactly as otherwise, so that
// their canonical keys are those of a run. Reading a value throws.
//
//     flush ──> detach ──> Capture::take ──> the listener: a new program, or a known one again
//
// There is one capture at a time, for all devices and threads: pending graphs are a device's, not a
// thread's, and so is what a flush does with them. The caches of compiled programs are left alone.
//
// Scalars are treated as program.h does: constants until they prove to be variable. What only a
// lowering can tell, that a rule needs a number at compile time, is not known here; such a number
// counts as variable, and is a constant again once the program is lowered.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "graph/scalars.h"
#include "graph/walk.h"

namespace lazyxla::graph {

class Capture {
 public:
  // One flush: a program not seen before, or (`is_new` false) one that serves it again.
  struct Event {
    const Graph& graph;
    const std::vector<bool>& variable;  // per slot: a runtime input
    size_t number;                      // of the program, from 0 in order of appearance
    bool is_new;
  };
  using Listener = std::function<void(const Event&)>;  // called without a device's mutex

  // `platform` ("tpu") is what the recorder's questions about lowerings are answered for.
  Capture(std::string platform, Listener listener)
      : platform_(std::move(platform)), listener_(std::move(listener)) {}

  const std::string& platform() const { return platform_; }

  // The active capture, or null.
  static std::shared_ptr<Capture> current();
  // Throws if one is active already.
  static void begin(std::shared_ptr<Capture> capture);
  static void end();

  // What a flush does instead of running the graph. Its promises become abstract. Throws if the
  // graph writes to a tensor that has data, and leaves that tensor as it was.
  void take(ir::PendingSet& pending, const Graph& graph);

 private:
  struct Program {
    std::vector<uint64_t> key;
    std::vector<bool> variable;
    std::vector<ir::ScalarValue> constants;
    bool serves(const Graph& graph) const;
  };

  const std::string platform_;
  const Listener listener_;
  std::mutex mutex_;
  std::vector<Program> programs_;
  ScalarHistory history_;
};

// The platform that is recorded for: the capture's, or the one that runs.
std::string recorded_platform();

}  // namespace lazyxla::graph
