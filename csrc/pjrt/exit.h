// What is left to do when the process exits.
#pragma once

namespace lazyxla::pjrt {

// To be called when the process is about to exit. If `busy`, some thread is at work within the
// plugin, and would not survive the end of the plugin's static variables: the process then ends
// without destroying any; also if waits are given up (common/waiting.h).
void prepare_to_exit(bool busy);

// To be called when the process exits, after its devices have done their work, or those who wait
// for them have given up. Not called in a forked child.
void call_at_exit(void (*function)());

}  // namespace lazyxla::pjrt
