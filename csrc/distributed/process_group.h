// The process group "lazyxla" of torch.distributed: c10d's calls as recorded collectives.
//
// A call returns once it is recorded. Its Work is complete then, as a launched kernel's is for
// further work on the device: every read of a result is ordered after it.
#pragma once

#include <pybind11/pybind11.h>

namespace lazyxla::distributed {

// make_process_group(store, shared_store, name, ranks, rank, timeout, comparison) -> ProcessGroup.
// `store` is the group's own and `shared_store` all processes'; `name` is the same in all; `ranks`
// are those of its members among all processes; this one is member `rank`; `comparison`, which
// collectives are compared (agreement.h), is "first", "always" or "never".
void bind_process_group(pybind11::module_& m);

}  // namespace lazyxla::distributed
