// Stages: how the pieces of a graph that was cut (cut.h) become one variant of its program.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/locks.h"
#include "program/cut.h"
#include "program/program.h"

namespace lazyxla::program {

const Piece& largest_of(const std::vector<Piece>& pieces);

// Finds or makes each piece's program, and puts them together. `reason` is why the whole is new,
// `varying` as in Origin, of the whole.
std::shared_ptr<Variant> compile_pieces(const Graph& whole, const std::vector<Piece>& pieces,
                                        const Origin& origin, const std::string& reason,
                                        const std::vector<bool>& varying);

// The other forms of a graph with collectives, for when not all members of a group have its program
// (replicas.h): one with inputs where it has numbers, or its pieces. Compiled when they are needed.
class Apart : public std::enable_shared_from_this<Apart> {
 public:
  // `graph`, without its data; all of it as one piece, and its pieces. The others as for
  // compile_pieces.
  Apart(Graph graph, std::vector<Piece> whole, std::vector<Piece> pieces, Origin origin,
        std::string reason, std::vector<bool> varying);

  // For these scalars. They wait while a worker compiles; it continues if the wait is interrupted.
  VariantRef whole(c10::ArrayRef<ir::ScalarValue> slots) { return find(whole_, slots); }
  VariantRef pieces(c10::ArrayRef<ir::ScalarValue> slots) { return find(pieces_, slots); }
  // Whether they are there already.
  bool has_pieces(c10::ArrayRef<ir::ScalarValue> slots);

 private:
  struct Form {
    std::vector<Piece> pieces;
    VariantRef last;
  };
  VariantRef find(Form& form, c10::ArrayRef<ir::ScalarValue> slots);
  VariantRef find_or_make(Form& form, const std::vector<ir::ScalarValue>& slots);

  const Origin origin_;
  const std::string reason_;
  const std::vector<bool> varying_;
  OrderedMutex mutex_;  // guards what follows; held while compiling
  Graph graph_;
  Form whole_, pieces_;
};

// The graph in the form that Apart takes.
Graph without_data(const Graph& graph);

}  // namespace lazyxla::program
