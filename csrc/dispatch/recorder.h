// The recorder: one kernel that records every operator, and knows none.
//
//     torch operator ──> Scan ──> shape memo ──hit──> Node, fresh tensors, writes
//                                     └─miss─> infer (meta functions) ──> Recipe
//
// The recipe tells everything that is the same for all such calls. A recorded operator computes
// nothing; errors of shape and dtype are PyTorch's own, thrown here, at the call.
//
// Which operators come here: those with a lowering, registered one by one by the names that
// Python's registry gives (their in-place and out= forms included), and, as the backend's fallback,
// every other operator that has no kernel of its own. For the latter Python is asked once whether
// PyTorch has a decomposition, or whether a program can call PyTorch's CPU kernel (host_call.h); if
// neither, the operator runs on the host (host.h). A decomposition is tried out with each kind of
// call, since its parts may have no lowering: such a call is a host call or runs on the host, too.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dispatch/op_info.h"
#include "dispatch/scan.h"
#include "ir/shape_memo.h"

namespace lazyxla::dispatch {

// Records one call: replaces the arguments on the stack by the results.
void record(const OpInfo& info, torch::jit::Stack* stack);

// Records one call of an operator that returns a tensor, and returns it, or an undefined tensor
// where the result is an argument that was written.
at::Tensor record(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

// To be called after the operator `op` (its OpSpec's id, or any number that tells it from others)
// was recorded on a device, without its mutex: runs what is pending if the mode says so, or when
// there is too much of it.
void after_recording(c10::DeviceIndex device, uint64_t op);

// Works out the recipe of a call that the memo does not know (infer.cpp). Throws PyTorch's error if
// the arguments are wrong; returns null if the operator cannot run on meta tensors.
std::unique_ptr<ir::Recipe> infer(const OpInfo& info, c10::ArrayRef<c10::IValue> args,
                                  const Scan& scan);

// Registers the recorder for these operators ("aten::addmm", ...) and for all that have one of them
// as functional counterpart. Operators that PyTorch decomposes (CompositeImplicitAutograd) are left
// alone. Returns the names registered.
std::vector<std::string> register_operators(const std::vector<std::string>& names);

// Where a call runs that is to be lowered through a decomposition.
using TryOut = std::function<ir::Recipe::Runs(const ir::OpSpec&, const Scan&)>;

// What Python answers: how an operator is lowered ("decomposition", "call", "host", or anything
// else for a rule), and what comes of trying out a call of it.
void set_lowering(std::function<std::string(const std::string&)> how, TryOut try_out);

// The operator that a call of operator `name` is recorded as; empty if it cannot be.
std::string functional_name(const std::string& name);

// A user has given the operator `name` a rule. It is recorded from now on, even if it has a kernel
// for all devices (as torch.library.custom_op makes them), and what was known of it is forgotten.
void rule_changed(const std::string& name);

}  // namespace lazyxla::dispatch
