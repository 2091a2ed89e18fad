// Dtypes that an operator does not take, or not together.
//
// PyTorch's kernels refuse most calls on tensors of several dtypes ("expected m1 and m2 to have the
// same dtype"), and some on integers; its meta functions accept many of them. For some of these
// calls they also return other dtypes than the kernels do. So the CPU's kernel is asked about each
// kind of call on tensors that are not all of one floating-point dtype, with tensors that are made
// up and small.
//
// Its refusal counts only if it is about the dtypes: if it accepts the same call on tensors of
// other dtypes. Else it may refuse what is made up, as it does where a size is among the arguments.
#pragma once

#include "dispatch/checks.h"

namespace lazyxla::dispatch {

// Throws what the CPU's kernel throws. Corrects the dtypes of the results. `inference` is what the
// meta functions returned.
void check_dtypes(const OpInfo& info, c10::ArrayRef<c10::IValue> args, Inference& inference);

}  // namespace lazyxla::dispatch
