// The process group "lazyxla" of torch.distributed: c10d's calls as recorded collectives.
//
// A call returns once it is recorded. Its Work is complete then, as a launched kernel's is to those
// who go on using the device: whatever reads a result comes after it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>

namespace lazyxla::distributed {

// `transport` carries the collectives of programs on the CPU; `name` is the same in all processes.
c10::intrusive_ptr<c10d::Backend> make_process_group(
    const c10::intrusive_ptr<c10d::Backend>& transport, const std::string& name);

}  // namespace lazyxla::distributed
