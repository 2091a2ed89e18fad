// What is left to do when the process exits.
#pragma once

namespace lazyxla::pjrt {

// To be called when the process exits, after its devices have done their work, or those who wait
// for them have given up (common/waiting.h). Not called in a forked child.
void call_at_exit(void (*function)());

}  // namespace lazyxla::pjrt
