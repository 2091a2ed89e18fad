// The host fallback: an operator that cannot be lowered runs on PyTorch's CPU kernel.
//
// Its arguments are read (which flushes), its results copied back. Each such operator is counted
// and named in one warning; in strict mode it is an error instead. Operators whose result's shape
// depends on the data (nonzero, masked_select, unique) always run here, without a warning.
#pragma once

#include <ATen/core/stack.h>

#include "dispatch/op_info.h"

namespace lazyxla::dispatch {

// `why` completes a sentence about the operator: "has no lowering".
void run_on_host(const OpInfo& info, torch::jit::Stack* stack, const char* why);

// The same with the kernel of another key, for calls whose arguments nothing has checked before:
// the kernel's errors come first, and a call that fails is no fallback, in strict mode neither.
void run_checked_on_host(const OpInfo& info, torch::jit::Stack* stack, const char* why,
                         c10::DispatchKey key);

// Throws if the settings do not allow a recorded call of this operator to run as a host call.
void check_host_call_allowed(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

}  // namespace lazyxla::dispatch
