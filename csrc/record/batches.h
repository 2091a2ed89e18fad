// Batches: where fused eager mode cuts the stream of operators.
//
// Fused eager mode runs operators by itself soon after they are recorded, several at a time. Where
// it cuts must not depend on a count or a clock: a loop whose body is no multiple of the count
// would be cut elsewhere in every iteration, and each cut is another program to compile. So a batch
// ends at a *known position*. A position is identified by the last few operators; positions are
// learnt. A batch that has grown to the most that may wait is cut where it is, and that position is
// known from then on: the next time around, the batch ends there once it has the least size. With
// most = 8, least = 3 and a loop body abcde:
//
//     abcdeabc | deabc | deabc | deabc | ...        two programs, however long the loop runs
//
// Repeated layers are cut at the same positions, too, and share their programs.
//
// The device must not wait while the host does something else. A thread checks now and then whether
// a batch is pending while the device is idle. (While the device works, a host that pauses has
// often only lost its processor to it.) Where the host pauses twice in a short while it will pause
// again: that position is learnt, and from then on the batch runs before the pause. Anywhere else a
// pause is more likely the operating system's, and another program is not worth it: the batch runs
// only if the pause gets long.
//
// Each thread's stream of operators is cut by itself: positions are learnt for a pending set.
#pragma once

#include <cstdint>

#include "ir/storage.h"

namespace lazyxla::record {

// To be called after an operator was recorded in fused mode; `op` says which. Whether the batch
// ends with it, so that the caller must flush.
bool batch_ends(ir::PendingSet& pending, uint64_t op);

// Ends the thread that runs what was left lying. Without the GIL.
void stop_watching_batches();

}  // namespace lazyxla::record
