// The line of the user's program that records now, for messages.
#pragma once

#include <string>
#include <vector>

namespace lazyxla {

// "train.py:31", where the innermost frame is that is neither torch's nor ours. Empty on autograd's
// threads, which have no frame of Python's. Takes the GIL. It runs no Python, so that no signal
// handler breaks in on a flush.
std::string user_line();

// The same with a colon, "train.py:31: ", to begin a message with; empty if unknown.
std::string user_line_prefix();

// Files whose paths begin with one of `paths` are not the user's.
void set_library_paths(std::vector<std::string> paths);

}  // namespace lazyxla
