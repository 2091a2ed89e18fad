// Capture: recording programs without running them (lazyxla.aot).
//
// While a capture is active, nothing reaches a device. Uploads and flushes give their tensors
// leaves on *abstract* buffers (program/buffer.h), which have a type and no data, and every flush
// hands its graph to the capture. Graphs are cut, numbered and given donations exactly as
// otherwise, so that their canonical keys are those of a run. Reading a value throws.
//
//     flush ──> detach ──> Capture::take ──> the listener: a new program, or a known one again
//
// A tensor that has data from before is an input like any other. If it is written to, its data is
// restored when the capture ends; the buffer is kept such that it can still be donated.
//
// There is one capture at a time, for all devices and threads. The caches of compiled programs are
// left alone.
//
// Scalars are treated as program/program.h does: constants until they prove to be variable. Whether
// a rule needs a number at compile time is known only by lowering. This is asked for when it
// matters: when a graph is captured again with other numbers.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/locks.h"
#include "program/buffer.h"
#include "program/graph.h"
#include "program/scalars.h"

namespace lazyxla::record {

class Capture {
 public:
  // One flush: a program not seen before, or (`is_new` false) one that serves it again.
  struct Event {
    const program::Graph& graph;
    const std::vector<bool>& variable;  // per slot: a runtime input
    size_t number;                      // of the program, from 0 in order of appearance
    bool is_new;
  };
  // Called without a device's mutex, by one thread at a time.
  struct Listener {
    std::function<void(const Event&)> take;
    // Lowers a captured program, by its number, and returns the slots whose numbers are part of it.
    std::function<std::vector<uint32_t>(size_t number)> static_slots;
  };

  // `platform` ("tpu") is the one for which lowerings are decided; `runs_here`: it is the running
  // client's. Meshes may be made of `devices`.
  Capture(std::string platform, bool runs_here, size_t devices, Listener listener)
      : platform_(std::move(platform)),
        runs_here_(runs_here),
        devices_(devices),
        listener_(std::move(listener)) {}

  const std::string& platform() const { return platform_; }
  bool runs_here() const { return runs_here_; }
  size_t devices() const { return devices_; }

  // The active capture, or null.
  static std::shared_ptr<Capture> current() {
    if (!active_.load(std::memory_order_acquire)) [[likely]]
      return nullptr;
    return find_current();
  }
  // Throws if one is active already.
  static void begin(std::shared_ptr<Capture> capture);
  // No-op if none is active.
  static void end();

  // What a flush does instead of running the graph. Its promises become abstract.
  void take(const program::Graph& graph);

  // To be called before a storage gets another value. Caller holds the storage's mutex.
  static void before_write(ir::Storage& storage) {
    if (active_.load(std::memory_order_relaxed)) [[unlikely]]
      keep_data(storage);
  }

 private:
  // What a storage held before.
  struct Kept {
    uint64_t id;  // of a storage that may be dead by now
    c10::DeviceIndex device;
    ir::Geometry base;
    ir::TensorType type;
    program::BufferRef buffer;
  };
  struct Program {
    std::vector<uint64_t> key;
    program::ScalarPlan scalars;  // static ones among its inputs, until it is lowered
    std::optional<std::vector<uint32_t>> static_slots{};  // known once it is lowered
    bool has_numbers_of(const program::Graph& graph) const;
  };

  // The number of the program that serves the graph; empty if there is none. Caller holds
  // `programs_mutex_`, as of those below.
  std::optional<size_t> find(const program::Graph& graph);
  size_t add(const program::Graph& graph);
  void learn_static_slots(size_t number);
  static std::shared_ptr<Capture> find_current();
  static void keep_data(ir::Storage& storage);
  void give_back_data();

  inline static std::atomic<bool> active_{false};  // most programs capture nothing

  const std::string platform_;
  const bool runs_here_;
  const size_t devices_;
  const Listener listener_;
  OrderedMutex programs_mutex_;  // held while lowering: waited for without the GIL
  std::vector<Program> programs_;
  program::ScalarHistory history_;
  Guarded<std::vector<Kept>> kept_;
};

// The platform that is recorded for: the capture's, or the one that runs.
std::string recorded_platform();

}  // namespace lazyxla::record
