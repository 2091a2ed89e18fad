// Compile options: XLA's, that a program is compiled with.
//
// Those of the process and of a compiled region belong to the program: a number that this process
// gave to the set of them is the first word of every canonical key. Those of an operator (a
// function that was compiled with options of its own) are in its OpSpec.
#pragma once

#include <cstdint>

#include "program/graph.h"

namespace lazyxla::program {

// The number of a set of options; 0 is that of none.
uint64_t number_options(const CompileOptions& options);
const CompileOptions& options_of(uint64_t number);

// All that the graph is compiled with. Its operators must agree on theirs.
CompileOptions compile_options(const Graph& graph);

}  // namespace lazyxla::program
