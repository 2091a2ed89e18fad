// Host programs (program/host_program.h) as calls of PyTorch's CPU kernels.
//
// An operator is not called so if XLA defines its result otherwise for some values (an integer
// divided by zero, a floating-point number beyond an integer's range), if it draws from the
// device's generator, or if the user gave it a rule. Everything else that the kernels refuse shows
// when a program is made: it is tried with zeros. One difference remains: the kernels raise an
// error for an index that is out of range, where a compiled program takes the nearest valid one.
#pragma once

#include "program/host_program.h"

namespace lazyxla::dispatch {

void install_host_programs();

// That of a graph of one call, of any operator: its CPU kernel's.
program::HostProgram host_program_of_call(const program::Graph& graph);

}  // namespace lazyxla::dispatch
