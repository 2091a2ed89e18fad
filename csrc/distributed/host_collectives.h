// Collectives of torch.distributed on the host's tensors, which Gloo serves beside our group.
//
// One process reads a loss, and so waits for the others to run the collectives before it; they only
// recorded these, and wait for it in a collective on the host, such as `all_gather_object`. Both
// would hang. So a collective on the host first starts what is recorded, if a collective is in it,
// or if it may be for the devices of several processes.
#pragma once

namespace lazyxla::distributed {

// From the first call on, for c10d's operators in this process.
void run_recorded_before_host_collectives();

}  // namespace lazyxla::distributed
