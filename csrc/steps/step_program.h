// Step programs: running a recorded step again, without recording it.
//
// A step reads and writes tensors that remain the same objects from step to step (its *state*:
// parameters, buffers, what an optimizer keeps), the gradients of some of them, and its arguments;
// and it makes new tensors, its results. Recording one step shows which tensor's memory each input
// of its program is, and which tensor takes each output:
//
//     input 0    the memory of state 0        output 0    the memory of state 0 (given away for it)
//     input 1    the memory of argument 0     output 1    a new tensor, the result
//
// Running it again takes the current content of that memory, promises the outputs to the same
// owners, and executes: what a flush does once its graph is numbered and its program found. It is
// undone like a flush if it fails, draws as many random numbers as the step did, and donates the
// same memory, unless it has other references by now.
//
// All this assumes that Python would do the same again, which guards.h checks. That the memory's
// layout is unchanged (the same geometries, none shared by two owners, spread over the same devices
// in the same way) is checked here, under the device's mutex.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dispatch/tensor.h"
#include "graph/tape.h"
#include "ir/storage.h"

namespace lazyxla::steps {

class StepProgram {
 public:
  // A tensor that the step made, with memory of its own.
  struct Fresh {
    ir::Geometry geometry;         // of the tensor
    ir::Geometry base;             // of its memory
    const ir::Sharding* sharding;  // that its memory was given, or null
    uint32_t output;
    bool requires_grad;  // it has a history, which backward() has used up
    bool inference;      // it was made in inference mode
  };

  // A run in three parts, of which the first and the last need the GIL: they look at gradients and
  // set them, as other threads do under it. The second has to be without.
  //
  // The tensors that the step takes, for arguments like those that it was recorded with. Empty, or
  // why it cannot be run.
  std::string find(c10::ArrayRef<at::Tensor> arguments, std::vector<at::Tensor>& tensors) const;
  // Runs the step on them. Appends the tensors that it makes. Empty, or why it cannot be run:
  // nothing has happened then. Throws what a flush would.
  std::string run(c10::ArrayRef<at::Tensor> tensors, std::vector<at::Tensor>& made) const;
  // Gives the state its new gradients, and drops all that are no results.
  void keep_gradients(std::vector<at::Tensor>& made) const;

 private:
  friend class StepRecording;

  struct Source {
    enum Kind : uint8_t { kState, kGradient, kArgument } kind;
    uint32_t index;     // of a gradient: of the state that it is the gradient of
    uint64_t storage;   // a state's
    ir::Geometry base;  // of its memory
    ir::Geometry view;  // the tensor's
    const ir::Sharding* sharding = nullptr;  // that its memory was given
    bool copied = false;  // an argument that enters as its own elements (dispatch/region_inputs.h)
    int leaf = -1;        // of the program, that it is; -1: not read
    int output = -1;      // that it gets; -1: not written
  };
  struct Gradient {
    uint32_t state;
    int source;  // that it is, or was before; -1: there is none
    int fresh;   // that it becomes; -1: it is kept
  };

  c10::DeviceIndex device_ = 0;
  graph::Tape taped_;
  std::vector<at::Tensor> state_;
  std::vector<Source> sources_;
  std::vector<Gradient> gradients_;
  std::vector<Fresh> fresh_;
  size_t results_ = 0;  // the first of `fresh_`; the others are gradients
};

// Records a step on the calling thread: made before it, finished when its region is left.
class StepRecording {
  using Source = StepProgram::Source;

 public:
  // All of one device. What is pending on it has run. `numbers` are a part of the state that the
  // step must not write to.
  StepRecording(std::vector<at::Tensor> state, std::vector<at::Tensor> numbers,
                std::vector<at::Tensor> arguments);

  // The program of the step with these results, all of them new tensors; or null, and the reason.
  std::pair<std::shared_ptr<StepProgram>, std::string> finish(
      const std::vector<at::Tensor>& results);
  // The step failed, or is not to be captured.
  void stop() {
    if (program_) program_->taped_.stop();
  }

 private:
  std::string add_source(Source::Kind kind, size_t index, const at::Tensor& tensor);
  std::string match_leaves();
  std::string match_outputs(const std::vector<at::Tensor>& results);
  std::string add_fresh(const at::Tensor& tensor, std::vector<bool>& used);

  std::shared_ptr<StepProgram> program_;
  const size_t first_number_;            // in the state
  std::vector<at::Tensor> tensors_;      // by source
  std::vector<const ir::Node*> before_;  // by source: its value's address only
  std::string problem_;
  uint64_t seed_, ordinal_;  // the device's generator's, before
  int64_t flushes_;
};

inline ir::Storage& storage_of(const at::Tensor& tensor) {
  return dispatch::storage_of(*tensor.unsafeGetTensorImpl());
}

inline ir::Geometry geometry_of(const at::Tensor& tensor) {
  return dispatch::geometry_of(*tensor.unsafeGetTensorImpl());
}

// Sets the content of memory that nothing else shares to a number.
void set_number(const at::Tensor& tensor, double number);

}  // namespace lazyxla::steps
