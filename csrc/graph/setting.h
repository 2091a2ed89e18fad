// The setting: what a program depends on besides its graph.
//
// One word, the first of every canonical key: torch's precision of matrix products and its default
// dtype, which mean the same in every process, and above them a number that this process gave to a
// set of options of XLA's compiler.
#pragma once

#include <cstdint>

#include "ir/node.h"

namespace lazyxla::graph {

// The setting of what the calling thread runs now.
uint64_t current_setting();

// What of it means the same in every process.
uint64_t portable_setting(uint64_t setting);

// Its options: those of the process, and over them those of the compiled region.
const ir::CompileOptions& options_of(uint64_t setting);

void set_process_options(ir::CompileOptions options);

}  // namespace lazyxla::graph
