// The bridge to the lowering room: hands a graph to Python as a lazyxla.lowering.program.Program
// and brings the StableHLO back. Used on cache misses only.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph/capture.h"

namespace lazyxla {

// Installs `lower`, a Python function (Program, platform, DeviceDescription, StableHLO version,
// reason) -> Lowered, as the graph room's lowerer; `how`, (operator name) -> str, and `try_out`,
// (Program of one node, platform) -> str, as what the recorder asks (dispatch::set_lowering).
void install_lowering(pybind11::function lower, pybind11::function how, pybind11::function try_out);

// Installs a Python function (number of operators, reason) as the listener of programs that are
// loaded instead of lowered.
void install_load_listener(pybind11::function listener);

// What is left of a captured graph beside its lazyxla.lowering.program.Program: by what the program
// store knows it, and what must live to lower it.
struct CapturedGraph {
  std::optional<std::string> key;  // portable_key.h
  std::vector<bool> variable;
  std::vector<ir::ScalarValue> slots;
  std::vector<std::shared_ptr<ir::LeafData>> held;
};

// The listener of a capture that hands its programs to a Python object with the methods
// take(number, Program or None if it is known, compile options, CapturedGraph) -> None and
// static_slots(number) -> sequence of ints.
graph::Capture::Listener capture_listener(pybind11::object recording);

}  // namespace lazyxla
