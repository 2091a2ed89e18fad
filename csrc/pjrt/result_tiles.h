// How a partitioned program's results lie on its devices, as the compiled program tells.
//
// It is read from the optimized HLO module (a protocol buffer), of which only this is looked at.
#pragma once

#include <cstdint>
#include <vector>

#include "compiled_program.h"

namespace lazyxla::pjrt {

struct ResultTiles {
  std::vector<int64_t> tiles;                 // how many each dimension is split into
  std::vector<std::vector<int64_t>> tile_of;  // per partition, its tile's place in each dimension
};

// One for each result; `ranks` are the results'. Throws Error if the program does not tell.
std::vector<ResultTiles> result_tiles(const CompiledProgram& program,
                                      const std::vector<size_t>& ranks, size_t partitions);

}  // namespace lazyxla::pjrt
