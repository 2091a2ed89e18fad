// Describing calls: turns the meta functions' answer into the call's recipe (shape_memo.h).
#pragma once

#include <memory>

#include "dispatch/inference_store.h"
#include "dispatch/recorder.h"

namespace lazyxla::dispatch {

// The recipe of a call. `functional` are the arguments of the functional form, in its own order.
// Throws if XLA has no such dtype, or if a result does not fit what is written.
std::unique_ptr<Recipe> make_recipe(const OpInfo& info, c10::ArrayRef<c10::IValue> functional,
                                    const Scan& scan, const Inference& inference);

}  // namespace lazyxla::dispatch
