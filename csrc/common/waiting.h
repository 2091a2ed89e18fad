// Waiting, so that Ctrl-C ends it.
//
// Python runs signal handlers in its main thread only, and only when called. So a wait in that
// thread, for a compiler, a device or another thread, calls it now and then: a wait that is
// interrupted throws what the handler raised. Other threads just wait.
//
//     waiting::wait([&] { return state != kPromised; });   // one side
//     state = kReady; waiting::announce();                 // the other
//
// Where processes share devices, each watches the others: if one is gone, all waits are given up.
//
// A waiting thread must not hold the GIL (common/gil.h), nor any lock that the announcer takes.
#pragma once

#include <functional>
#include <string>

namespace lazyxla::waiting {

// Returns when `ready()` is true, which is asked at each announcement of whatever: it must be
// brief.
void wait(const std::function<bool()>& ready);

// To be called after something has changed that a thread may wait for. Cheap if none waits.
void announce();

// From now on every wait throws std::runtime_error with this: what is awaited may never come.
// Called by the code that watches the processes that this one works with.
void give_up(std::string reason);
// Throws the reason, if there is one.
void check_given_up();

// Whether a wait of this thread can end early: interrupted, or given up.
bool is_interruptible();
// Waits of all threads may be given up: the other processes are watched.
void set_watched();

// `check` runs the pending signal handlers and throws what they raise; it is called in the thread
// that calls this function, which is the interpreter's main thread.
void set_signal_check(void (*check)());

}  // namespace lazyxla::waiting
