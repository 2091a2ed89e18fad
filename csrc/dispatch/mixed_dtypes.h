// Calls on tensors of several dtypes.
//
// PyTorch's kernels refuse most of them ("expected m1 and m2 to have the same dtype"), and give the
// results of some another dtype than its meta functions say. So the CPU's kernel is asked about
// each kind of call on tensors of several dtypes, with tensors that are made up and small.
//
// Its refusal counts only if it is about the dtypes: if it accepts the same call on tensors of
// other dtypes. Else it may refuse what is made up, as it does where a size is among the arguments.
#pragma once

#include "dispatch/checks.h"

namespace lazyxla::dispatch {

// Throws what the CPU's kernel throws. Corrects the dtypes of the results. `inference` is what the
// meta functions returned.
void check_mixed_dtypes(const OpInfo& info, c10::ArrayRef<c10::IValue> args, Inference& inference);

}  // namespace lazyxla::dispatch
