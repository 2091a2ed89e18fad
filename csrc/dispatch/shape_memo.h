// The shape memo: a cache of the results' types of operators' calls.
//
// PyTorch itself infers shapes, by running the operator on meta tensors; that costs 50 to 900 us,
// so it is done once per kind of call. The memo's key is the operator and everything that its
// result's type can depend on: each tensor's dtype, sizes and strides, and each static argument. A
// scalar's value is not in it, only its category, save where it decides a size, as in arange. (Such
// calls share a recipe if their results' sizes are the same.)
//
// A Recipe holds all that recording a call takes once its key is known: the OpSpec of the node, the
// geometry of each fresh result, and the targets of the node's outputs if the operator writes to
// its arguments. Nodes point into their recipes and hold them.
//
// The memo is bounded (LAZYXLA_MAX_CALLS). A call that was forgotten and is met again has a new
// OpSpec, so that graphs with it are new, too.
#pragma once

#include <memory>
#include <vector>

#include "common/bounded_map.h"
#include "common/locks.h"
#include "ir/node.h"

namespace lazyxla::dispatch {

struct Recipe : ir::LeafData {
  // A tensor the call creates.
  struct Fresh {
    int output;             // of the node; -1: an undefined tensor
    ir::Geometry geometry;  // dense
    size_t nbytes;
  };
  // A tensor among the arguments that the call writes.
  struct Write {
    uint32_t output;
    bool cast = false;      // the node's output has another dtype than the tensor
    bool resized = false;   // the tensor takes `geometry` first
    bool silent = false;    // ... without a warning
    bool reshaped = false;  // the node's output has another shape, with as many elements
    bool in_list = false;   // of a _foreach_ operator
    ir::Geometry geometry;
  };
  // What the operator returns, per return of its schema.
  struct Return {
    int argument;  // this argument, or -1:
    bool is_list;
    uint32_t first_fresh;
    uint32_t count;
  };

  // Where such a call runs.
  enum class Runs : uint8_t {
    kProgram,   // as operations of XLA's
    kHostCall,  // on the host, called by the program
    kHost,      // on the host, between two programs: the call is not recorded
    kNowhere,   // it has no results
  };

  ir::OpSpec spec;
  Runs runs = Runs::kProgram;
  std::vector<Fresh> fresh;
  std::vector<Write> writes;
  std::vector<Return> returns;
};

using RecipeRef = std::shared_ptr<Recipe>;

// A key while it is looked up: words in the caller's buffer.
struct MemoKey {
  const uint64_t* words;
  size_t size;
  uint64_t hash;
};

class ShapeMemo {
 public:
  static ShapeMemo& get();

  RecipeRef find(const MemoKey& key);
  // Keeps the recipe; if another thread was first, its recipe wins and is returned.
  RecipeRef insert(const MemoKey& key, RecipeRef recipe);
  size_t size();

 private:
  struct Hash {
    size_t operator()(const MemoKey& key) const { return key.hash; }
  };
  struct Equal {
    bool operator()(const MemoKey& a, const MemoKey& b) const;
  };
  struct Entry {
    std::vector<uint64_t> key;  // which the map's own refers to
    RecipeRef recipe;
  };
  Guarded<BoundedMap<MemoKey, Entry, Hash, Equal>, SpinLock> entries_;
};

}  // namespace lazyxla::dispatch
