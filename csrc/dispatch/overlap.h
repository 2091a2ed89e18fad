// Memory that an operator writes and that another tensor of the call shares.
//
// PyTorch refuses to write where elements share memory, since the result would depend on the order
// of the writes. What is read and written in the same call (torch.add(x, 1, out=x)), some CPU
// kernels can do as a whole or in part, and some refuse. The schema does not say which, except for
// pointwise operators: the kernel itself is called, once per kind of call.
#pragma once

#include <ATen/core/ivalue.h>

#include "dispatch/op_info.h"
#include "dispatch/scan.h"

namespace lazyxla::dispatch {

// Throws PyTorch's error if a call that is to be recorded may not write what it writes. False for a
// call on lists that has to go through them tensor by tensor, since one tensor's new elements are
// another's: _foreach_add_([x, x], 1).
bool check_overlap(const OpInfo& info, c10::ArrayRef<c10::IValue> args, const Scan& scan);

// The same for a call that runs on the host, where copies would hide what is shared.
void check_overlap_on_host(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

}  // namespace lazyxla::dispatch
