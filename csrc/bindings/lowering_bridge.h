// The bridge to the lowering room: hands a graph to Python as a lazyxla.lowering.program.Program
// and brings the StableHLO back. Used on cache misses only.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "record/capture.h"

namespace lazyxla::bindings {

// Installs `lower`, a Python function (Program, platform, DeviceDescription, StableHLO version,
// Occasion) -> Lowered, as the lowerer of programs; `how`, (operator name) -> str, and
// `check_lowering`, (Program of one node, platform) -> str, as the recorder's queries
// (dispatch::set_lowering). An Occasion is a tuple: the user's line, the reason, the hash of the
// graph's key.
void install_lowering(pybind11::function lower, pybind11::function how,
                      pybind11::function check_lowering);

// Installs the listeners of programs that are loaded instead of lowered, (number of operators,
// Occasion) -> None, and of graphs that are cut, (each stage's number of operators, Occasion) ->
// None.
void install_listeners(pybind11::function loaded, pybind11::function on_host,
                       pybind11::function cut);

// Installs Python functions for messages: (addresses of tensors' memory) -> str, the user's names
// of tensors, and (device index) -> str, which tensors take most of the device's memory.
void install_tensor_descriptions(pybind11::function namer, pybind11::function largest);

// What is left of a captured graph beside its lazyxla.lowering.program.Program: its key in the
// program store, and what must live to lower it.
struct CapturedGraph {
  std::optional<std::string> key;  // program/graph.h
  std::vector<bool> variable;
  std::vector<ir::ScalarValue> slots;
  std::vector<std::shared_ptr<ir::LeafData>> held;
};

// The listener of a capture that hands its programs to a Python object with the methods
// take(number, Program or None if it is known, compile options, CapturedGraph) -> None and
// static_slots(number) -> sequence of ints.
record::Capture::Listener capture_listener(pybind11::object recording);

}  // namespace lazyxla::bindings
