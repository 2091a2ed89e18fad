// Settings: what a program depends on besides its operators.
//
// Those of torch that change what an operator means, its precision of matrix products and its
// default dtype, belong to each operator: they count as they were when it was recorded, whatever
// they are when it is run. An OpSpec has them in one word.
//
// Options of XLA's compiler belong to the program. A number that this process gave to a set of them
// is the first word of every canonical key.
#pragma once

#include <ATen/Context.h>

#include <cstdint>

#include "ir/node.h"

namespace lazyxla::graph {

// What an operator that is recorded now depends on; never 0. The default dtype in the lower byte,
// at::Float32MatmulPrecision in the upper one.
uint16_t record_settings();

// What torch.set_float32_matmul_precision said, or else what is set for CUDA's products: PyTorch
// has a setting for each backend besides, and does not tell the first one while they differ.
at::Float32MatmulPrecision matmul_precision();

// The number of the options of what the calling thread runs now.
uint64_t current_options();

// The options: those of the process, and over them those of the compiled region.
const ir::CompileOptions& options_of(uint64_t setting);

void set_process_options(ir::CompileOptions options);

}  // namespace lazyxla::graph
