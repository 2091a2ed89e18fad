// Sizes that do not fit each other, where meta functions let them pass.
//
// Most of these would be broadcast or cut by a lowering rule, so that a mistake gave wrong numbers,
// and others would fail while the program is lowered, far from the call. The CPU's kernels refuse
// them; asking the kernel would cost its time (see checks.h), so they are compared here.
#pragma once

#include <ATen/core/ivalue.h>

#include "dispatch/inference_store.h"
#include "dispatch/op_info.h"

namespace lazyxla::dispatch {

// Throws where PyTorch's CPU kernel would read beyond the end of a tensor. To be called before that
// kernel is asked about anything.
void check_for_kernel(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

// Throws what PyTorch's CPU kernel throws. `inference` is what the meta functions told. Once per
// memo key.
void check_sizes(const OpInfo& info, c10::ArrayRef<c10::IValue> args, const Inference& inference);

}  // namespace lazyxla::dispatch
