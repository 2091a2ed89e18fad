// Settings: what a program depends on besides its operators.
//
// Those of torch that change what an operator means, its matmul precision and its default dtype,
// belong to each operator: they count as they were when it was recorded, not as they are when it is
// run. An OpSpec holds them in one word.
//
// Options of XLA's compiler belong to the program (program/graph.h).
#pragma once

#include <ATen/Context.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>

#include "ir/node.h"

namespace lazyxla::record {

// What an operator that is recorded now depends on; never 0. The default dtype in the lower byte,
// at::Float32MatmulPrecision in the upper one.
uint16_t record_settings();

// What torch.set_float32_matmul_precision set, or else what is set for CUDA's matmuls: PyTorch also
// has a setting for each backend, and does not return the first one while they differ.
at::Float32MatmulPrecision matmul_precision();

// The number (program/graph.h) of the options of what the calling thread runs now: those
// of the process, and over them those of the compiled region.
uint64_t current_options();

void set_process_options(CompileOptions options);

// Whether the calling thread is in a step of an optimizer.
//
// What an optimizer does in its first step and never again, or does with other numbers each time,
// would make another program of that step. So the memory that it makes for its state is filled by
// programs of its own, and the numbers that it multiplies and adds are inputs from the start.
//
// What the step's closure records, forward and backward, is not the optimizer's.
bool in_optimizer_step();

// To be called with what an operator without operands makes or fills in such a step: if it is gone
// when the step ends, it was no state, and the next step will make it anew.
void watch_until_step_ends(const c10::TensorImpl& made, const ir::OpSpec& spec);

// Whether it was so in the calling thread's last step with such a call.
bool is_temporary(const ir::OpSpec& spec);

// To be called once. (torch.optim.Optimizer marks for PyTorch's profiler where a step begins and
// ends, and lazyxla/optimizer_steps.py does for closures.)
void watch_optimizer_steps();

}  // namespace lazyxla::record
