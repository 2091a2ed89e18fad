#include "ir/node.h"

#include <new>

namespace lazyxla::ir {

uint64_t OpSpec::next_id() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

NodePtr Node::make(const OpSpec* spec, c10::ArrayRef<Value> operands,
                   c10::ArrayRef<ScalarValue> slots) {
  // One allocation holds the node, its operands and its slots: recording is on the hot path.
  size_t bytes =
      sizeof(Node) + operands.size() * sizeof(Value) + slots.size() * sizeof(ScalarValue);
  char* memory = static_cast<char*>(::operator new(bytes));
  Node* node = new (memory) Node();
  node->spec_ = spec;
  node->num_operands_ = operands.size();
  node->num_slots_ = slots.size();
  node->operands_ = reinterpret_cast<Value*>(memory + sizeof(Node));
  node->slots_ = reinterpret_cast<ScalarValue*>(node->operands_ + operands.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    new (node->operands_ + i) Value(std::move(const_cast<Value&>(operands[i])));
  }
  std::copy(slots.begin(), slots.end(), node->slots_);
  return NodePtr::adopt(node);
}

NodePtr Node::make_leaf(TensorType type, std::shared_ptr<LeafData> data) {
  Node* node = new (::operator new(sizeof(Node))) Node();
  node->leaf_ = std::make_unique<Leaf>(Leaf{std::move(type), std::move(data)});
  return NodePtr::adopt(node);
}

const TensorType& Node::output_type(uint32_t index) const {
  return leaf_ ? leaf_->type : spec_->outputs[index];
}

void Node::drop(Node* node) {
  if (node->refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) destroy(node);
}

void Node::destroy(Node* node) {
  c10::SmallVector<Node*, 32> dead{node};
  while (!dead.empty()) {
    Node* n = dead.pop_back_val();
    for (size_t i = 0; i < n->num_operands_; ++i) {
      Node* operand = n->operands_[i].node.release();
      if (operand->refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) dead.push_back(operand);
    }
    n->~Node();
    ::operator delete(static_cast<void*>(n));
  }
}

}  // namespace lazyxla::ir
