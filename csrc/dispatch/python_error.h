// Distinguishes errors of meta functions from interruptions.
//
// Meta functions are written in Python for the most part. Their errors are about the arguments. But
// they may also end with an exception that has another cause: Ctrl-C, the handler of another
// signal, too little memory or stack. That one is passed on to the operator's caller.
#pragma once

#include <exception>

namespace lazyxla::dispatch {

// Whether an exception comes from Python and is unrelated to the call that it ended.
bool is_interruption(const std::exception& error);

}  // namespace lazyxla::dispatch
