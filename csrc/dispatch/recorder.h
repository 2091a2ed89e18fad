// The recorder: one kernel that records every operator, without knowing any.
//
//     torch operator ──> Scan ──> shape memo ──hit──> Node, fresh tensors, writes
//                                     └─miss─> infer (meta functions) ──> Recipe
//
// The recipe holds everything that is the same for all such calls. A recorded operator computes
// nothing; errors of shape and dtype are PyTorch's own, thrown here, at the call.
//
// registration.h decides which operators are recorded; lowering_kind.h how each is lowered.
#pragma once

#include <ATen/core/stack.h>

#include <memory>

#include "dispatch/op_info.h"
#include "dispatch/scan.h"
#include "dispatch/shape_memo.h"

namespace lazyxla::dispatch {

struct Inference;

// Records one call: replaces the arguments on the stack by the results.
void record(const OpInfo& info, torch::jit::Stack* stack);

// Records one call of an operator that returns a tensor, and returns it, or an undefined tensor
// where the result is an argument that was written.
at::Tensor record(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

// To be called after the operator `op` (its OpSpec's id, or any number that identifies it) was
// recorded on a device, without its mutex: runs what is pending if the mode requires it, or when
// there is too much of it.
void after_recording(c10::DeviceIndex device, uint64_t op);

// Works out the recipe of a call that the memo does not know (infer.cpp). Throws PyTorch's error if
// the arguments are wrong; returns null if the operator cannot run on meta tensors.
std::unique_ptr<Recipe> infer(const OpInfo& info, c10::ArrayRef<c10::IValue> args,
                              const Scan& scan);

// The recipe that follows from the meta functions' answer (describe.cpp). `functional` are the
// arguments of the functional form, in its own order. Throws if XLA has no such dtype, or if a
// result does not fit what is written.
std::unique_ptr<Recipe> make_recipe(const OpInfo& info, c10::ArrayRef<c10::IValue> functional,
                                    const Scan& scan, const Inference& inference);

}  // namespace lazyxla::dispatch
