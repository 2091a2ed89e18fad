// Index checking: a debug setting (LAZYXLA_CHECK_INDICES).
//
// An index tensor's values are data, unknown while recording. XLA clamps an index that is out of
// range, so that a wrong one gives wrong numbers and no error. With the setting on, every operator
// that takes indices reads them first and raises the error that PyTorch's CPU kernels raise, at the
// call; that runs what is recorded, each time. Other values that only kernels check are treated
// alike: the weights of multinomial, the number of elements that masked_scatter takes.
#pragma once

#include <ATen/core/stack.h>

#include "dispatch/op_info.h"

namespace lazyxla::dispatch {

// Throws if an index among the operator's arguments is out of range. Operators without indices
// pass.
void check_indices(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

}  // namespace lazyxla::dispatch
