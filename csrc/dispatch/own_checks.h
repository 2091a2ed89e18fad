// Checks of arguments that are made here, since PyTorch's meta functions leave them out and its CPU
// kernels need all of the sizes, or more than sizes, to make them.
#pragma once

#include <string>

#include "dispatch/op_info.h"

namespace lazyxla::dispatch {

struct OwnChecks {
  Checks::Check of_static = nullptr;   // of sizes, dtypes and static arguments
  Checks::Check of_numbers = nullptr;  // of numbers, instead of asking the CPU
};

// Those of an operator, by the name of its functional form. They are called for its in-place and
// out= forms, too, which may lack some of its arguments.
OwnChecks own_checks(const std::string& functional_name);

// Refuses numbers that PyTorch cannot pass to a kernel in a list, where it takes those below -2**62
// for symbols.
void check_lists(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

// What tensor options a factory function cannot have here.
void check_options(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

}  // namespace lazyxla::dispatch
