// Index tensors: what tensor[mask] and tensor[cpu_indices] need before they can be recorded, and
// what is filled where an index or a mask says so.
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

// Whether the operator writes one value in place where an index or a mask says so. (index_put_
// may.)
bool fills_where_asked(const OpInfo& info);

// Carries out such a call on an expanded tensor, whose elements share memory: an element is written
// if any of its copies is. False if the call is anything else. Indices are no masks any more.
bool fill_once(const OpInfo& info, torch::jit::Stack* stack);

// Carries out tensor[mask] = number; false if the call is anything else.
bool fill_by_mask(const OpInfo& info, torch::jit::Stack* stack);

}  // namespace lazyxla::dispatch
