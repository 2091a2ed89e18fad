// Stages: how the pieces of a graph that was cut (cut.h) become one variant of its program.
#pragma once

#include <string>
#include <vector>

#include "program/cut.h"
#include "program/program.h"

namespace lazyxla::graph {

const Piece& largest_of(const std::vector<Piece>& pieces);

// Finds or makes each piece's program, and puts them together. `reason` is why the whole is new,
// `varying` as in Origin, of the whole.
VariantRef compile_pieces(const Graph& whole, const std::vector<Piece>& pieces,
                          const Origin& origin, const std::string& reason,
                          const std::vector<bool>& varying);

}  // namespace lazyxla::graph
