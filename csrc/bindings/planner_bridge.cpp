// C++'s access to lazyxla/planning.
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>
#include <pybind11/stl.h>

#include <map>

#include "bindings/bindings.h"
#include "program/graph.h"
#include "program/planner.h"
#include "program/workers.h"

namespace py = pybind11;

namespace lazyxla::bindings {
namespace {

// A graph as a lazyxla.planning.outline.Outline.
class Outliner {
 public:
  explicit Outliner(const program::Graph& graph) : graph_(graph) {}

  py::object run() {
    py::list inputs, operators, operands, slots;
    for (const ir::NodePtr& leaf : graph_.leaves) {
      const ir::TensorType& type = leaf->output_type(0);
      inputs.append(c10::str(type.dtype, c10::IntArrayRef(type.dims)));
    }
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      const ir::Node& node = *graph_.nodes[i].get();
      operators.append(operator_of(*node.spec()));
      operands.append(operands_of(i));
      slots.append(slots_of(node));
    }
    return module_.attr("Outline")(inputs, operators, operands, slots, graph_.outputs, made(),
                                   graph_.aliases);
  }

 private:
  py::object operator_of(const ir::OpSpec& spec) {
    py::object& known = operators_[spec.id];
    if (!known) {
      known = module_.attr("Operator")(spec.name, spec.id, spec.operators, spec.outputs.size(),
                                       spec.numbers_vary, spec.collective);
    }
    return known;
  }

  py::list operands_of(size_t node) const {
    py::list operands;
    for (size_t i = 0; i < graph_.nodes[node]->operands().size(); ++i) {
      operands.append(graph_.operand(node, i));
    }
    return operands;
  }

  std::vector<uint32_t> made() const {
    std::vector<uint32_t> values;
    for (const program::Made& each : graph_.made_first()) values.push_back(each.value);
    return values;
  }

  py::tuple slots_of(const ir::Node& node) const {
    py::tuple slots(node.slots().size());
    for (size_t i = 0; i < node.slots().size(); ++i) {
      const ir::SlotSpec& spec = node.spec()->slots[i];
      slots[i] = slot_value_(node.slots()[i].i, spec.kind == ir::SlotKind::kIndex, spec.optional);
    }
    return slots;
  }

  const program::Graph& graph_;
  py::object module_ = py::module_::import("lazyxla.planning.outline");
  py::object slot_value_ = module_.attr("SlotValue");
  std::map<uint64_t, py::object> operators_;
};

program::Plan plan(const py::function& function, const program::Graph& graph, bool may_cut,
                   bool may_share, bool may_alternate) {
  py::object plan = function(Outliner(graph).run(), may_cut, may_share, may_alternate);
  return {plan.attr("reason").cast<std::string>(),
          plan.attr("stages").cast<std::vector<uint32_t>>(),
          plan.attr("even_are_new").cast<bool>(),
          plan.attr("is_certain").cast<bool>(),
          plan.attr("varying").cast<std::vector<bool>>(),
          plan.attr("otherwise").cast<std::vector<uint32_t>>()};
}

std::optional<program::ReplicaGroups> arrange(const py::function& function,
                                              const std::vector<program::Ranks>& groups) {
  py::object found = function(groups);
  if (found.is_none()) return std::nullopt;
  return program::ReplicaGroups{
      found.attr("ranks").cast<program::Ranks>(),
      found.attr("rows").cast<std::vector<std::vector<program::Ranks>>>()};
}

void install_planner(py::function plan_graph, py::function cut, py::function grid) {
  program::planner = {
      [&function = kept(std::move(plan_graph))](const program::Graph& graph, bool may_cut,
                                                bool may_share, bool may_alternate) {
        return in_python([&] { return plan(function, graph, may_cut, may_share, may_alternate); });
      },
      [&function = kept(std::move(cut))](const program::Graph& graph) {
        return in_python(
            [&] { return function(Outliner(graph).run()).cast<std::vector<uint32_t>>(); });
      },
      [&function = kept(std::move(grid))](const std::vector<program::Ranks>& groups) {
        return in_python([&] { return arrange(function, groups); });
      }};
}

}  // namespace

void bind_planner(py::module_& m) { m.def("install_planner", &install_planner); }

}  // namespace lazyxla::bindings
