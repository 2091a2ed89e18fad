// A traced graph: what torch.compile hands over, as one node of the pending graph.
//
// Dynamo and AOTAutograd trace a function into an FX graph of ATen operators. Recording it anew at
// every call would waste the tracing; instead a call adds a single node, which lowers to the whole
// graph. Forward, backward and optimizer graphs of a training step thus still run as one program.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "ir/node.h"

namespace lazyxla::dispatch {

class TracedGraph {
 public:
  // `number` tells Python which graph this is; `outputs` are the geometries of its results. If it
  // draws random numbers, each call takes one ordinal of the default generator.
  TracedGraph(int64_t number, size_t inputs, std::vector<ir::Geometry> outputs, bool random);

  // Records a call. All inputs are on one lazyxla device and as they were when traced.
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& inputs) const;

 private:
  ir::OpSpec* spec_;  // never freed: nodes point to it
  std::vector<ir::Geometry> outputs_;
};

}  // namespace lazyxla::dispatch
