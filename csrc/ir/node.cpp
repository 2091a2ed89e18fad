#include "ir/node.h"

#include <new>

#include "common/pool.h"

namespace lazyxla::ir {
namespace {

constexpr size_t kLeafSize = sizeof(Node) + sizeof(TensorType);

size_t size_in_memory(size_t operands, size_t slots) {
  return sizeof(Node) + operands * sizeof(Value) + slots * sizeof(ScalarValue);
}

}  // namespace

uint64_t OpSpec::next_id() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

NodePtr Node::make(const OpSpec* spec, c10::ArrayRef<Value> operands,
                   c10::ArrayRef<ScalarValue> slots, std::shared_ptr<LeafData> held) {
  void* memory = pool_allocate(size_in_memory(operands.size(), slots.size()));
  Node* node = new (memory) Node(spec, operands.size(), slots.size(), std::move(held));
  Value* to = node->behind<Value>();
  node->of_data_ = spec->collective;
  for (const Value& operand : operands) {
    node->of_data_ |= operand.node->of_data_;
    new (to++) Value(std::move(const_cast<Value&>(operand)));
  }
  std::copy(slots.begin(), slots.end(), reinterpret_cast<ScalarValue*>(to));
  return NodePtr::adopt(node);
}

NodePtr Node::make_leaf(TensorType type, std::shared_ptr<LeafData> data) {
  void* memory = pool_allocate(kLeafSize);
  Node* node = new (memory) Node(nullptr, 0, 0, std::move(data));
  new (node->behind<TensorType>()) TensorType(std::move(type));
  return NodePtr::adopt(node);
}

void Node::drop(Node* node) {
  if (node->refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) destroy(node);
}

void Node::destroy(Node* node) {
  c10::SmallVector<Node*, 32> dead{node};
  while (!dead.empty()) {
    Node* n = dead.pop_back_val();
    for (size_t i = 0; i < n->num_operands_; ++i) {
      Node* below = n->behind<Value>()[i].node.release();
      if (below->refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) dead.push_back(below);
    }
    size_t size = kLeafSize;
    if (n->is_leaf()) {
      n->behind<TensorType>()->~TensorType();
    } else {
      size = size_in_memory(n->num_operands_, n->num_slots_);
    }
    n->~Node();
    pool_free(n, size);
  }
}

}  // namespace lazyxla::ir
