// The line of the user's program that records now, for messages.
#pragma once

#include <string>
#include <vector>

namespace lazyxla {

// "train.py:31", the innermost frame that is neither torch's nor ours. Empty on autograd's threads,
// which have no Python frame. Takes the GIL. It runs no Python, so no signal handler interrupts a
// flush.
std::string user_line();

// The same with a colon, "train.py:31: ", to begin a message with; empty if unknown.
std::string user_line_prefix();

// Files whose paths begin with one of `paths` are not the user's.
void set_library_paths(std::vector<std::string> paths);

}  // namespace lazyxla
