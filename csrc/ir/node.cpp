#include "ir/node.h"

#include <mutex>
#include <new>

#include "ir/spin_lock.h"

namespace lazyxla::ir {

namespace {

// Memory for nodes. A graph's nodes live until it is flushed and then die together, which general
// allocators serve slowly; here dead nodes wait in lists, by size, for the next graph.
class NodePool {
 public:
  static NodePool& get() {
    static auto* instance = new NodePool();
    return *instance;
  }

  void* allocate(size_t bytes) {
    size_t which = (bytes + kStep - 1) / kStep;
    if (which >= kClasses) return ::operator new(bytes);
    {
      std::lock_guard lock(lock_);
      if (Free* free = free_[which]) {
        free_[which] = free->next;
        return free;
      }
    }
    return ::operator new(which * kStep);
  }

  void deallocate(void* memory, size_t bytes) {
    size_t which = (bytes + kStep - 1) / kStep;
    if (which >= kClasses) return ::operator delete(memory);
    std::lock_guard lock(lock_);
    free_[which] = new (memory) Free{free_[which]};
  }

 private:
  static constexpr size_t kStep = 32, kClasses = 16;
  struct Free {
    Free* next;
  };
  SpinLock lock_;
  Free* free_[kClasses] = {};
};

size_t node_bytes(size_t operands, size_t slots) {
  return sizeof(Node) + operands * sizeof(Value) + slots * sizeof(ScalarValue);
}

}  // namespace

uint64_t OpSpec::next_id() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

NodePtr Node::make(const OpSpec* spec, c10::ArrayRef<Value> operands,
                   c10::ArrayRef<ScalarValue> slots, std::shared_ptr<LeafData> held) {
  // One allocation holds the node, its operands and its slots: recording is on the hot path.
  char* memory =
      static_cast<char*>(NodePool::get().allocate(node_bytes(operands.size(), slots.size())));
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
  if (held) node->leaf_ = std::make_unique<Leaf>(Leaf{.data = std::move(held)});
  return NodePtr::adopt(node);
}

NodePtr Node::make_leaf(TensorType type, std::shared_ptr<LeafData> data) {
  Node* node = new (NodePool::get().allocate(node_bytes(0, 0))) Node();
  node->leaf_ = std::make_unique<Leaf>(Leaf{std::move(type), std::move(data)});
  return NodePtr::adopt(node);
}

const TensorType& Node::output_type(uint32_t index) const {
  return spec_ ? spec_->outputs[index] : leaf_->type;
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
    size_t bytes = node_bytes(n->num_operands_, n->num_slots_);
    n->~Node();
    NodePool::get().deallocate(n, bytes);
  }
}

}  // namespace lazyxla::ir
