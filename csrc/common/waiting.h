// Waiting, so that Ctrl-C ends it.
//
// Python runs signal handlers in its main thread only, and only when it is asked to. So whoever
// waits in that thread, for a compiler, a device or another thread, asks now and then: a wait that
// is interrupted throws what the handler raised. Other threads just wait.
//
//     waiting::wait([&] { return state != kPromised; });   // one side
//     state = kReady; waiting::announce();                 // the other
//
// Whoever waits must not hold the GIL (common/gil.h), nor any mutex that the announcer takes.
#pragma once

#include <functional>

namespace lazyxla::waiting {

// Returns when `ready()` is true. `ready` is called under a mutex: it must be brief, take no other
// lock and throw nothing.
void wait(const std::function<bool()>& ready);

// To be called after something has changed that somebody may wait for. Cheap if nobody waits.
void announce();

// Whether a wait of this thread can be interrupted.
bool is_interruptible();

// `check` runs the pending signal handlers and throws what they raise; it is called in the thread
// that calls this function, which is the interpreter's main thread.
void set_signal_check(void (*check)());

}  // namespace lazyxla::waiting
