// The lazy graph: immutable nodes, reference-counted, pointing at their operands.
//
// A node is one recorded operator call. What is the same for every such call (the operator, its
// static arguments, operand and output types) is in an OpSpec, made once by the shape memo; the
// node itself only adds its operands and the values of its scalars. `x * 2 + y`:
//
//     Node(add.Tensor) ── operand 0 ── Node(mul.Tensor) ── operand 0 ── Leaf(x)
//            │                             └ slot 0 = 2
//            ├ slot 0 = 1 (alpha)
//            └ operand 1 ── Leaf(y)
//
// A leaf is a node without an OpSpec: data that exists, or is promised, on the device.
//
// Invariants: a node never changes after its construction (but for the walk's scratch fields,
// guarded by the walk's mutex); the graph has no cycles; reference counts are atomic, so
// that any thread may drop a graph. Dropping is iterative: a chain of a million nodes is no deep
// recursion.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/options.h"
#include "ir/geometry.h"

namespace lazyxla::ir {

// The value of a Python number (or 0-dim CPU tensor) that takes part in a recorded operator. Kept
// out of the OpSpec, so that a changing learning rate does not make a different operator.
union ScalarValue {
  double f;
  int64_t i;
};

enum class SlotKind : uint8_t {
  kFloat,   // `f`; becomes a runtime input once it varies
  kInt,     // `i`; likewise
  kIndex,   // `i`; likewise, but a difference between programs does not count
  kRandom,  // `i`; seed or ordinal of a random operator: a runtime input from the start
};

struct SlotSpec {
  c10::ScalarType dtype;  // of the number; the imaginary part of a complex one is a Double
  bool wrapped;           // a Python number: takes part in type promotion by its category only
  SlotKind kind;
  bool optional = false;  // a number that the caller did not give is a 1, which rules leave out
  bool narrow = false;    // kIndex: this value and all others of such calls have 32 bits
};

// One argument of the operator, in schema order. Operands and slots are numbered by their order of
// appearance, depth first.
struct Arg {
  enum class Kind : uint8_t {
    kOperand,
    kSlot,
    kComplex,      // a complex number: a slot for its real part, then one for its imaginary part
    kFixedScalar,  // a scalar whose value is part of the OpSpec: one beyond int64, say
    kConstant,     // int, string, list of ints, None ...
    kDtype,        // a constant that is an element type
    kList,
    kGeometry,
  };
  Kind kind = Kind::kConstant;
  c10::IValue constant{};                              // kConstant, kFixedScalar, kDtype
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // kFixedScalar: of the scalar
  bool wrapped = true;                                 // kFixedScalar
  std::vector<Arg> list{};                             // kList
  Geometry geometry{};                                 // kGeometry
};

// Kept with a spec by the graph room: the operator's own programs (graph/one_operator.h).
class OwnPrograms {
 public:
  virtual ~OwnPrograms() = default;
};

class Sharding;

// What is the same for calls of one kind.
struct CallFields {
  std::string name;  // "aten::add.Tensor", "lazyxla::view"
  std::vector<Arg> args;
  std::vector<SlotSpec> slots;
  std::vector<TensorType> outputs;
  bool random = false;        // the last two slots are the generator's seed and the call's ordinal
  bool collective = false;    // other processes take part: it must run exactly once
  bool spreads = false;       // it runs on its operands' mesh: its lowering may name the axes
  bool portable = true;       // its arguments mean the same in every process
  bool numbers_vary = false;  // its scalars are taken for inputs before they vary
  uint32_t operators = 1;     // how many it counts as: more for a graph that was traced
  uint16_t settings = 0;  // torch's when the call was recorded (record/settings.h); 0: none matters
  std::string content;    // of one that is not portable: what does, instead of arguments; or empty
  CompileOptions compile_options;      // that a program with it is compiled with
  const Sharding* sharding = nullptr;  // that it gives its result; null for almost all
};

struct OpSpec : CallFields {
  const uint64_t id = next_id();  // unique in this process; what a canonical key is made of
  mutable std::atomic<OwnPrograms*> own_programs{nullptr};  // made once

  OpSpec() = default;
  // The same call with a new id, so that it counts as another operator.
  OpSpec(const OpSpec& of) : CallFields(of) {}
  OpSpec& operator=(const OpSpec&) = delete;
  ~OpSpec() { delete own_programs.load(); }

  static uint64_t next_id();
};

class Node;

// An owning pointer to a node.
class NodePtr {
 public:
  NodePtr() = default;
  NodePtr(const NodePtr& other);
  NodePtr(NodePtr&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
  NodePtr& operator=(NodePtr other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  ~NodePtr();

  static NodePtr adopt(Node* node) {  // takes over the reference the caller holds
    NodePtr p;
    p.node_ = node;
    return p;
  }
  Node* get() const { return node_; }
  Node* operator->() const { return node_; }
  Node* release() { return std::exchange(node_, nullptr); }
  explicit operator bool() const { return node_ != nullptr; }

 private:
  Node* node_ = nullptr;
};

// One output of a node.
struct Value {
  NodePtr node;
  uint32_t index = 0;

  explicit operator bool() const { return static_cast<bool>(node); }
  const TensorType& type() const;
};

// What a leaf stands for; the program room derives its device buffers from it. A node that is no
// leaf may hold one, too: something that must live as long as the node.
class LeafData {
 public:
  virtual ~LeafData() = default;
};

// Values to be dropped. Code that replaces values under a device's mutex drops the old ones after
// releasing it, since they may be the last references to large graphs.
class Garbage {
 public:
  void add(Value value) {
    if (value) values_.push_back(std::move(value));
  }

 private:
  c10::SmallVector<Value, 4> values_;
};

class Node {
 public:
  // `operands` are moved from; `held` is dropped with the node.
  static NodePtr make(const OpSpec* spec, c10::ArrayRef<Value> operands,
                      c10::ArrayRef<ScalarValue> slots, std::shared_ptr<LeafData> held = nullptr);
  static NodePtr make_leaf(TensorType type, std::shared_ptr<LeafData> data);

  const OpSpec* spec() const { return spec_; }  // null for a leaf
  bool is_leaf() const { return spec_ == nullptr; }
  c10::ArrayRef<Value> operands() const { return {behind<Value>(), num_operands_}; }
  c10::ArrayRef<ScalarValue> slots() const {
    return {reinterpret_cast<ScalarValue*>(behind<Value>() + num_operands_), num_slots_};
  }
  const TensorType& output_type(uint32_t index) const {
    return spec_ ? spec_->outputs[index] : *behind<TensorType>();
  }
  const std::shared_ptr<LeafData>& leaf_data() const { return data_; }
  uint32_t use_count() const { return refs_.load(std::memory_order_acquire); }

  void retain() { refs_.fetch_add(1, std::memory_order_relaxed); }
  static void drop(Node* node);

  // Scratch of the walk that numbers a graph; only under the walk's mutex (graph/walk.cpp).
  mutable uint64_t visit = 0;
  mutable uint32_t number = 0;
  mutable uint32_t edges = 0;

  // Whether it is data, or computed from any: not a tensor of zeros, or of random numbers.
  bool is_of_data() const { return of_data_; }
  // Of the content of a storage that never had data: whether it was recorded before anything that
  // is of data (PendingSet::reads_data), and whether it was written over.
  bool is_made_first() const { return made_first_.load(std::memory_order_relaxed); }
  bool is_written_over() const { return written_over_.load(std::memory_order_relaxed); }
  void note_made_first() { made_first_.store(true, std::memory_order_relaxed); }
  void note_written_over() { written_over_.store(true, std::memory_order_relaxed); }

 private:
  Node(const OpSpec* spec, size_t num_operands, size_t num_slots, std::shared_ptr<LeafData> data)
      : num_operands_(num_operands), num_slots_(num_slots), spec_(spec), data_(std::move(data)) {}
  static void destroy(Node* node);

  // In the same allocation: a leaf's type; of another node its operands, then its slots.
  template <typename T>
  T* behind() const {
    return reinterpret_cast<T*>(const_cast<Node*>(this) + 1);
  }

  std::atomic<uint32_t> refs_{1};
  uint32_t num_operands_;
  uint32_t num_slots_;
  bool of_data_ = true;
  std::atomic<bool> made_first_{false};
  std::atomic<bool> written_over_{false};
  const OpSpec* spec_;
  std::shared_ptr<LeafData> data_;  // of a node that is no leaf: what it holds, if anything
};

inline NodePtr::NodePtr(const NodePtr& other) : node_(other.node_) {
  if (node_) node_->retain();
}
inline NodePtr::~NodePtr() {
  if (node_) Node::drop(node_);
}
inline const TensorType& Value::type() const { return node->output_type(index); }

}  // namespace lazyxla::ir
