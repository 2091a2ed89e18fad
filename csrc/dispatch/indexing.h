// Index tensors: what tensor[mask] and tensor[cpu_indices] need before they can be recorded.
//
// PyTorch lets the index tensors of `index` and `index_put` be boolean masks and be on the CPU. A
// mask stands for the positions where it is true, whose number depends on the data: it is read. The
// one case that needs no reading, tensor[mask] = number, becomes masked_fill_.
#pragma once

#include <ATen/core/stack.h>

#include "dispatch/op_info.h"

namespace lazyxla::dispatch {

// The position of the argument that holds index tensors (Tensor?[] indices), or -1.
int indices_argument(const OpInfo& info);

// Replaces masks by their positions and moves CPU indices to the device.
void expand_indices(const OpInfo& info, torch::jit::Stack* stack);

// Carries out tensor[mask] = number; false if the call is anything else.
bool fill_by_mask(const OpInfo& info, torch::jit::Stack* stack);

}  // namespace lazyxla::dispatch
