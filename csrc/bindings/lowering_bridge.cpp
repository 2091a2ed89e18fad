#include "bindings/lowering_bridge.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <map>

#include "bindings/bindings.h"
#include "dispatch/lowering_kind.h"
#include "graph/execute.h"
#include "pjrt/client.h"
#include "pjrt/runtime.h"
#include "program/program.h"
#include "program/replicas.h"
#include "program/workers.h"

namespace py = pybind11;

namespace lazyxla::bindings {
namespace {

using ir::Arg;

py::object to_python(const ir::SlotSpec& spec, const ir::ScalarValue& slot) {
  if (spec.kind == ir::SlotKind::kFloat) return py::cast(slot.f);
  return spec.dtype == c10::ScalarType::Bool ? py::cast(slot.i != 0) : py::cast(slot.i);
}

// The classes of lazyxla/lowering/program.py.
struct Classes {
  py::object module = py::module_::import("lazyxla.lowering.program");
  py::object ref = module.attr("Ref"), slot = module.attr("Slot"), spec = module.attr("TensorSpec"),
             geometry = module.attr("Geometry"), slot_spec = module.attr("SlotSpec"),
             node = module.attr("Node"), program = module.attr("Program"),
             settings_class = module.attr("Settings"), partition = module.attr("Partition");

  py::object tensor(const ir::TensorType& type) const {
    return spec(type.dtype, c10::IntArrayRef(type.dims));
  }
};

// Walks a node's arguments in order, handing out its operands and slots one after the other.
class Exporter {
 public:
  Exporter(const program::Graph& graph, const std::vector<bool>& variable)
      : graph_(graph), variable_(variable) {}

  py::object run() {
    py::list inputs, nodes, outputs;
    for (const ir::NodePtr& leaf : graph_.leaves) {
      inputs.append(classes_.tensor(leaf->output_type(0)));
    }
    describe_slots();
    for (; node_ < graph_.nodes.size(); ++node_) nodes.append(node_of(*graph_.nodes[node_].get()));
    for (uint32_t output : graph_.outputs) outputs.append(classes_.ref(output));
    py::dict donations;
    for (size_t i = 0; i < graph_.aliases.size(); ++i) {
      if (graph_.aliases[i] >= 0) donations[py::int_(i)] = graph_.aliases[i];
    }
    return classes_.program(inputs, nodes, outputs, slots_, donations, partition(), groups());
  }

 private:
  py::object partition() const {
    if (!graph_.partition) return py::none();
    py::list axes, inputs, results;
    for (const auto& [name, size] : graph_.partition->mesh->axes()) {
      axes.append(py::make_tuple(name, size));
    }
    for (const ir::Sharding* input : graph_.partition->inputs) inputs.append(spec_of(*input));
    for (const ir::Sharding* result : graph_.partition->results) {
      results.append(result ? py::object(spec_of(*result)) : py::none());
    }
    return classes_.partition(py::tuple(axes), py::tuple(inputs), py::tuple(results));
  }

  py::dict groups() const {
    py::dict groups;
    if (!graph_.replicas) return groups;
    for (const program::Replicas::Group& group : graph_.replicas->groups) {
      py::list rows;
      for (const program::Ranks& row : group.rows) rows.append(py::tuple(py::cast(row)));
      groups[py::str(group.name)] = py::tuple(rows);
    }
    return groups;
  }

  void describe_slots() {
    size_t i = 0;
    for (const ir::NodePtr& node : graph_.nodes) {
      for (const ir::SlotSpec& spec : node->spec()->slots) {
        slots_.append(classes_.slot_spec(to_python(spec, graph_.slots[i]), spec.dtype, spec.wrapped,
                                         static_cast<bool>(variable_[i])));
        ++i;
      }
    }
  }

  py::object node_of(const ir::Node& node) {
    const ir::OpSpec& spec = *node.spec();
    next_operand_ = 0;
    const size_t first_slot = next_slot_;
    py::list args, outputs;
    for (const Arg& arg : spec.args) args.append(argument(arg));
    // As the call was scanned (dispatch/scan.h) and described (dispatch/describe.cpp).
    const size_t slots = next_slot_ - first_slot + (spec.random ? 2 : 0);
    TORCH_INTERNAL_ASSERT(next_operand_ == node.operands().size() && slots == spec.slots.size(),
                          spec.name, " has other operands or slots than its arguments say");
    for (const ir::TensorType& type : spec.outputs) outputs.append(classes_.tensor(type));
    py::object rng = py::none();
    if (spec.random) {
      rng = py::make_tuple(classes_.slot(next_slot_), classes_.slot(next_slot_ + 1));
      next_slot_ += 2;
    }
    return classes_.node(spec.name, py::tuple(args), py::tuple(outputs), rng,
                         settings(spec.settings));
  }

  py::object settings(uint16_t word) {
    if (word == 0) return py::none();
    py::object& known = settings_[word];
    if (!known) {
      known = classes_.settings_class(py::cast(static_cast<c10::ScalarType>(word & 0xff)),
                                      static_cast<int>(word >> 8));
    }
    return known;
  }

  py::object argument(const Arg& arg) {
    switch (arg.kind) {
      case Arg::Kind::kOperand:
        return classes_.ref(graph_.operand(node_, next_operand_++));
      case Arg::Kind::kSlot:
        return classes_.slot(next_slot_++);
      case Arg::Kind::kComplex:  // by its first slot
        next_slot_ += 2;
        return classes_.slot(next_slot_ - 2);
      case Arg::Kind::kFixedScalar: {
        slots_.append(classes_.slot_spec(torch::jit::toPyObject(arg.constant), arg.dtype,
                                         arg.wrapped, false));
        return classes_.slot(py::len(slots_) - 1);
      }
      case Arg::Kind::kDtype:
        return py::cast(static_cast<c10::ScalarType>(arg.constant.toInt()));
      case Arg::Kind::kConstant:
        return torch::jit::toPyObject(arg.constant);
      case Arg::Kind::kList: {
        py::list list;
        for (const Arg& element : arg.list) list.append(argument(element));
        return list;
      }
      case Arg::Kind::kGeometry:
        return classes_.geometry(arg.geometry.dtype, c10::IntArrayRef(arg.geometry.sizes),
                                 c10::IntArrayRef(arg.geometry.strides), arg.geometry.offset);
    }
    return py::none();
  }

  const program::Graph& graph_;
  const std::vector<bool>& variable_;
  Classes classes_;
  py::list slots_;
  std::map<uint16_t, py::object> settings_;
  size_t node_ = 0;
  size_t next_operand_ = 0;
  size_t next_slot_ = 0;
};

// One call as a graph of its own, on operands that need no data, with a spec of its own.
struct OneCall {
  OneCall(const ir::OpSpec& of, const dispatch::Scan& scan)
      : spec(std::make_unique<ir::OpSpec>(of)) {
    std::vector<ir::Value> operands;
    for (const c10::TensorImpl* tensor : scan.operands) {
      ir::TensorType type{c10::typeMetaToScalarType(tensor->dtype()),
                          {tensor->sizes().begin(), tensor->sizes().end()}};
      operands.push_back({ir::Node::make_leaf(std::move(type), nullptr), 0});
      graph.add_leaf(operands.back().node);
    }
    std::vector<ir::ScalarValue> slots(scan.slots.begin(), scan.slots.end());
    slots.resize(spec->slots.size(), {.i = 0});  // what a random operator draws
    graph.add_node(ir::Node::make(spec.get(), operands, slots));
    for (uint32_t leaf = 0; leaf < graph.leaves.size(); ++leaf) graph.add_operand(leaf, 0, true);
    graph.number_values();
    for (size_t i = 0; i < spec->outputs.size(); ++i) graph.outputs.push_back(graph.values[0] + i);
    graph.aliases.assign(graph.leaves.size(), -1);
  }

  std::unique_ptr<const ir::OpSpec> spec;
  program::Graph graph;
};

// Rethrows a Python error of the lowering; a LoweringError names the node that failed.
[[noreturn]] void throw_failure(py::error_already_set& error) {
  py::object node = py::getattr(error.value(), "node", py::none());
  if (node.is_none()) throw error;
  throw program::LoweringFailure("lazyxla: " + py::str(error.value()).cast<std::string>(),
                                 node.cast<size_t>());
}

py::tuple to_python(const program::Occasion& occasion) {
  return py::make_tuple(occasion.line, occasion.reason, occasion.key);
}

std::shared_ptr<CapturedGraph> captured(const program::Graph& graph,
                                        const std::vector<bool>& variable) {
  auto result = std::make_shared<CapturedGraph>(
      CapturedGraph{program::portable_key(graph), variable, graph.slots, {}});
  for (const ir::NodePtr& node : graph.nodes) {
    if (node->leaf_data()) result->held.push_back(node->leaf_data());
  }
  return result;
}

// Numbers that are part of their OpSpec have slots after the graph's own; nothing to note.
std::vector<uint32_t> slots_among(const py::object& numbers, size_t count) {
  std::vector<uint32_t> slots;
  for (py::handle slot : numbers) {
    const auto number = slot.cast<uint32_t>();
    if (number < count) slots.push_back(number);
  }
  return slots;
}

}  // namespace

record::Capture::Listener capture_listener(py::object recording) {
  const auto owner = owned_without_gil(std::move(recording));
  auto take = [owner](const record::Capture::Event& event) {
    py::gil_scoped_acquire gil;
    py::function function = owner->attr("take");
    if (!event.is_new) {
      call_unwatched(function, event.number, py::none(), py::none(), py::none());
      return;
    }
    call_unwatched(function, event.number, Exporter(event.graph, event.variable).run(),
                   py::cast(program::compile_options(event.graph)),
                   py::cast(captured(event.graph, event.variable)));
  };
  auto static_slots = [owner](size_t number) {
    py::gil_scoped_acquire gil;
    py::function function = owner->attr("static_slots");
    return call_unwatched(function, number).cast<std::vector<uint32_t>>();
  };
  return {take, static_slots};
}

void install_lowering(py::function lower, py::function how, py::function check_lowering) {
  program::set_lowerer([&lower = kept(std::move(lower))](const program::Graph& graph,
                                                         const std::vector<bool>& variable,
                                                         const program::Occasion& occasion) {
    pjrt::Runtime& runtime = pjrt::Runtime::get();
    const std::string platform = runtime.platform();
    const pjrt::DeviceDescription& device = runtime.client().devices().at(0).description();
    return in_python([&] {
      py::object lowered;
      try {
        lowered = lower(Exporter(graph, variable).run(), platform, device,
                        runtime.plugin().stablehlo_current_version(), to_python(occasion));
      } catch (py::error_already_set& error) {
        throw_failure(error);
      }
      return program::Lowered{lowered.attr("artifact").cast<std::string>(),
                              slots_among(lowered.attr("static_slots"), graph.slots.size())};
    });
  });
  auto how_hook = [&how = kept(std::move(how))](const std::string& name) {
    py::gil_scoped_acquire gil;
    return call_unwatched(how, name).cast<std::string>();
  };
  auto try_out_hook = [&check = kept(std::move(check_lowering))](const ir::OpSpec& spec,
                                                                 const dispatch::Scan& scan) {
    // On a worker, as all lowering, which shares the graph: the caller may be interrupted.
    std::string platform = record::recorded_platform();
    auto call = std::make_shared<OneCall>(spec, scan);
    const auto runs = program::start_on_worker<std::string>([call, platform, &check] {
      return in_python([&] {
        const std::vector<bool> variable(call->graph.slots.size());
        return check(Exporter(call->graph, variable).run(), platform).cast<std::string>();
      });
    });
    return runs->get() == "host"   ? dispatch::Recipe::Runs::kHost
           : runs->get() == "call" ? dispatch::Recipe::Runs::kHostCall
                                   : dispatch::Recipe::Runs::kProgram;
  };
  dispatch::set_lowering(how_hook, try_out_hook);
}

void install_listeners(py::function loaded, py::function on_host, py::function cut) {
  program::listeners = {
      [&loaded = kept(std::move(loaded))](size_t operators, const program::Occasion& occasion) {
        in_python([&] { loaded(operators, to_python(occasion)); });
      },
      [&on_host = kept(std::move(on_host))](const program::Graph& graph,
                                            const program::Occasion& occasion) {
        in_python([&] {
          const std::vector<bool> variable(graph.slots.size());
          on_host(Exporter(graph, variable).run(), to_python(occasion));
        });
      },
      [&cut = kept(std::move(cut))](const std::vector<size_t>& operators,
                                    const program::Occasion& occasion) {
        in_python([&] { cut(operators, to_python(occasion)); });
      }};
}

// Text that Python makes for an error's message. On a worker: a signal handler must not interrupt
// an undo.
template <typename Argument>
std::string text_from_python(const py::function& function, Argument argument) {
  auto text = program::start_on_worker<std::string>([&function, argument = std::move(argument)] {
    return in_python([&] { return function(argument).template cast<std::string>(); });
  });
  try {
    return text->get();
  } catch (const std::exception&) {  // it only makes a message clearer
    return "";
  }
}

void install_tensor_descriptions(py::function namer, py::function largest) {
  graph::set_tensor_descriptions(
      {[&namer = kept(std::move(namer))](const std::vector<const void*>& addresses) {
         std::vector<uint64_t> numbers;
         for (const void* address : addresses)
           numbers.push_back(reinterpret_cast<uint64_t>(address));
         return text_from_python(namer, std::move(numbers));
       },
       [&largest = kept(std::move(largest))](c10::DeviceIndex device) {
         return text_from_python(largest, int{device});
       }});
}

}  // namespace lazyxla::bindings
