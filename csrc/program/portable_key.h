// The portable key: a graph's canonical key in bytes that mean the same in every process.
//
// The canonical key names operators by their OpSpecs' ids, which each process gives out anew. Here
// every OpSpec is written out once, and referred to by its index.
#pragma once

#include <optional>
#include <string>

#include "program/graph.h"

namespace lazyxla::program {

// Empty if an operator means something in this process only: a graph of torch.compile's, or an
// argument that cannot be written out.
std::optional<std::string> portable_key(const Graph& graph);

}  // namespace lazyxla::program
