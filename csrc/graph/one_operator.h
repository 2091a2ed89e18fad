// One operator at a time: how eager mode runs.
//
// An operator that runs at its call needs no graph, since its operands are computed. Each OpSpec
// keeps the programs that were compiled for it alone, so an eager call is one look-up and one
// execution. The first calls of a kind are recorded and flushed as any graph is; once there is a
// compiled program, the flush leaves it here.
//
//     eager call ──> prepare ──hit──> promised leaves for the results, execute
//                       └─miss──> record, flush ──> keep
//
// Calls of one spec differ in which operands are the same data, which results take over an
// operand's memory (an in-place operator may), and in their numbers.
#pragma once

#include <memory>
#include <optional>

#include "graph/runner.h"
#include "graph/walk.h"
#include "ir/storage.h"
#include "program/buffer.h"
#include "program/program.h"

namespace lazyxla::graph {

class OneOperator {
 public:
  // A storage, and the output of the operator that becomes its content.
  struct Result {
    ir::Storage* storage;
    uint32_t output;
  };

  // If a program for such a call is known: gives the results' storages leaves on promised buffers,
  // and returns what `run` needs. All operands are leaves; the results' base geometries are those
  // of the outputs. `setting` is current_options(), asked before the mutex is taken; `draws` are
  // the random numbers that the call has drawn. Caller holds the mutex.
  static std::optional<OneOperator> prepare(const ir::OpSpec& spec, uint64_t setting,
                                            c10::ArrayRef<ir::Value> operands,
                                            c10::ArrayRef<ir::ScalarValue> slots,
                                            c10::ArrayRef<Result> results,
                                            std::vector<ir::Draws> draws, c10::DeviceIndex device,
                                            ir::Garbage& garbage);

  // Runs it, without the mutex.
  void run(c10::ArrayRef<ir::ScalarValue> slots);

  // Notes the program of a graph that is a single operator.
  static void keep(const program::Graph& graph, const program::VariantRef& variant);

 private:
  explicit OneOperator(ExecutionSlot slot) : execution_slot_(std::move(slot)) {}

  ExecutionSlot execution_slot_;
  program::VariantRef variant_;
  c10::SmallVector<program::BufferRef, 8> inputs_;
  c10::SmallVector<int, 8> donated_;
  c10::SmallVector<program::BufferRef, 4> promises_;
  std::vector<Replaced> replaced_;
  std::vector<ir::Draws> draws_;
};

}  // namespace lazyxla::graph
