// Alignment: which operators of one graph are those of another.
//
// The shortest way to edit one list into the other, by Myers' greedy algorithm ("An O(ND)
// Difference Algorithm and Its Variations", 1986).
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace lazyxla::graph {

struct Alignment {
  std::vector<int32_t> places;  // per element of `now`, where it stands in `before`, or -1
  size_t edits;                 // elements that only one of both has
};

// Nothing if it takes more than `most` edits. Time and memory grow with edits * (size + edits).
std::optional<Alignment> align(c10::ArrayRef<uint64_t> now, c10::ArrayRef<uint64_t> before,
                               size_t most);

}  // namespace lazyxla::graph
