// The thread on which programs for the CPU run PyTorch's parallel kernels.
//
// OpenMP keeps a team of threads for each thread that has run a parallel kernel. If all teams
// together have more threads than there are processors, those that wait for the next kernel sleep
// at once instead of spinning, and each kernel takes up to a millisecond longer, the user's own
// included. A program runs on any of the plugin's threads; so all its kernels run on one, and the
// thread that starts a program gives its own team up.
#pragma once

#include <functional>

namespace lazyxla {

// Runs `work` on that thread and waits for it. Throws what it throws.
void run_on_kernel_thread(const std::function<void()>& work);

// Ends this thread's team, if it has one and kernels run on the other thread: the next parallel
// kernel here starts another. Not to be called in a parallel kernel.
void release_team();

}  // namespace lazyxla
