// Stages: how the pieces of a graph that was cut (cut.h) become one variant of its program.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "program/cut.h"
#include "program/program.h"

namespace lazyxla::graph {

const Piece& largest_of(const std::vector<Piece>& pieces);

// Finds or makes each piece's program, and puts them together. `reason` is why the whole is new,
// `varying` as in Origin, of the whole.
std::shared_ptr<Variant> compile_pieces(const Graph& whole, const std::vector<Piece>& pieces,
                                        const Origin& origin, const std::string& reason,
                                        const std::vector<bool>& varying);

// A graph with collectives in pieces, for the members of a group that do not all have the same
// graph (replicas.h). They are compiled when that happens.
class Apart : public std::enable_shared_from_this<Apart> {
 public:
  // `whole`, without its data. The others as for compile_pieces.
  Apart(Graph whole, std::vector<Piece> pieces, Origin origin, std::string reason,
        std::vector<bool> varying);

  // Of these scalars. Waits while it is compiled, by a worker, which goes on if the wait is
  // interrupted.
  VariantRef variant(c10::ArrayRef<ir::ScalarValue> slots);

 private:
  VariantRef find_or_make(const std::vector<ir::ScalarValue>& slots);

  const Origin origin_;
  const std::string reason_;
  const std::vector<bool> varying_;
  std::mutex mutex_;  // guards what follows; held while compiling
  Graph whole_;
  std::vector<Piece> pieces_;
  VariantRef last_;
};

// A graph as such a whole.
Graph without_data(const Graph& graph);

}  // namespace lazyxla::graph
