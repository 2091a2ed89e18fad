// Telling apart what an exception of Python's says.
//
// Meta functions are written in Python for the most part. An error of theirs is a verdict on the
// arguments; but an exception may end them that has nothing to do with these: Ctrl-C, the handler
// of another signal, too little memory or stack. That one belongs to whoever called the operator.
#pragma once

#include <exception>

namespace lazyxla {

// Whether an exception comes from Python and says nothing of the call that it ended.
bool is_interruption(const std::exception& error);

}  // namespace lazyxla
