// Launches of programs that the processes of a group run together (program/replicas.h).
//
// A launched collective waits on the device for the others, for ever if they launch something else.
// So the processes check before that all are in the same call, as on the CPU (agreement.h); one
// that learns that they are not launches nothing.
#pragma once

namespace lazyxla::distributed {

// Gives the program room the functions that run and launch collectives.
void install_collective_launches();

}  // namespace lazyxla::distributed
