// The process group "lazyxla" of torch.distributed: c10d's calls as recorded collectives.
//
// A call returns once it is recorded. Its Work is complete then, as a launched kernel's is to those
// who go on using the device: whatever reads a result comes after it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace lazyxla::distributed {

// `transport` carries the collectives of programs on the CPU; `store` is shared by all processes;
// `name` is the same in all; `ranks` are those of the group among all processes; `comparison`,
// which collectives are compared (agreement.h), is "first", "always" or "never".
c10::intrusive_ptr<c10d::Backend> make_process_group(
    const c10::intrusive_ptr<c10d::Backend>& transport,
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& name,
    std::vector<int64_t> ranks, const std::string& comparison);

}  // namespace lazyxla::distributed
