// A traced graph: what torch.compile hands over, as one node of the pending graph.
//
// Dynamo and AOTAutograd trace a function into an FX graph of ATen operators. Recording it anew at
// every call would waste the tracing; instead a call adds a single node, which lowers to the whole
// graph. Forward, backward and optimizer graphs of a training step thus still run as one program.
//
// Python keeps the FX graph by its number. It must be kept as long as it may be lowered: by the
// TracedGraph, which can be called again, and by every pending node of it. They share its lifetime;
// when the last of them is dropped, `set_graph_dropped`'s function is called with the number.
#pragma once

#include <ATen/core/TensorBase.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "ir/node.h"

namespace lazyxla::dispatch {

class TracedGraph {
 public:
  // A tensor of the device, or a 0-dim CPU tensor of this dtype, whose number is then an input like
  // any Python number's; wrapped, if it stands for one.
  using Input = std::optional<ir::SlotSpec>;
  static ir::SlotSpec number(c10::ScalarType dtype, bool wrapped);

  // A tensor that a call returns: a fresh one that holds an output of the node, or a view of an
  // earlier result.
  struct Result {
    ir::Geometry geometry;
    uint32_t output;
    int32_t base;  // the result that it is a view of, or -1
  };

  // An input that a call writes in place.
  struct Write {
    uint32_t input;
    uint32_t output;
  };

  struct Description {
    int64_t number;       // identifies the graph in Python
    std::string content;  // identifies it in all processes; empty: nothing does
    uint32_t operators;   // that were traced
    c10::DeviceIndex device;
    std::vector<Input> inputs;
    std::vector<ir::TensorType> outputs;  // of the node
    std::vector<Result> results;
    std::vector<Write> writes;
    bool random;  // draws random numbers: each call takes one ordinal of the default generator
    CompileOptions options;
  };

  explicit TracedGraph(Description description);

  c10::DeviceIndex device() const { return device_; }
  uint64_t id() const;  // of its OpSpec
  const std::vector<Input>& inputs() const { return inputs_; }

  // Records a call on tensors that are as they were when traced, in the order of `inputs()`. The
  // caller calls after_recording() when it has dropped them.
  std::vector<at::TensorBase> record(c10::ArrayRef<c10::TensorImpl*> inputs) const;

 private:
  class Lifetime;

  c10::DeviceIndex device_;
  std::vector<Input> inputs_;
  std::vector<Result> results_;
  std::vector<Write> writes_;
  std::shared_ptr<Lifetime> lifetime_;
};

// Called with a graph's number, on any thread, with or without the GIL.
void set_graph_dropped(std::function<void(int64_t number)> dropped);

}  // namespace lazyxla::dispatch
