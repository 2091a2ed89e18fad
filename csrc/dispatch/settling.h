// Settling: runs what precedes a step, so that it is not part of the step's program.
//
// Only the first step is recorded after the operators that make its model and its optimizer's
// state. As one program they would be compiled together, and the step once more by itself. So the
// model and the state get programs of their own:
//
//     with torch.device("lazyxla"):
//         model = Model()          # recorded: random numbers, zeros, ones
//     loss = model(x).sum()        # runs what made the model, then records
//     optimizer.step()             # runs what makes the state
//
// A model is known by its parameters and buffers: modules register them, optimizers are given them,
// and initialisation writes to them. What was made no later than the newest one, from no data,
// belongs to the model, and so does what was computed from that alone, such as a copy for
// averaging. A batch made on the device, in the loop and so after the model, belongs to the step.
//
// Initialisation may flush: it reads values until all samples are in range, and the host makes an
// orthogonal matrix. What it writes to parameters after that, from whatever data, still belongs to
// the model, until autograd records an operator that reads one.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/util/ArrayRef.h>

#include "dispatch/scan.h"
#include "ir/storage.h"

namespace lazyxla::dispatch {

// Notes that the tensor is a module's parameter or buffer, or an optimizer's parameter.
void note_model_state(const c10::TensorImpl& tensor);

// To be called before an operator is recorded. Runs what its operands need to be settled.
void settle(const Scan& scan);

// The same before operands are read for another reason, none of them written.
void settle_operands(c10::ArrayRef<const c10::TensorImpl*> operands, ir::PendingSet& pending);

}  // namespace lazyxla::dispatch
