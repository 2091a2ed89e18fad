// C++'s access to what is kept on disk: lazyxla/cache.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "bindings/lowering_bridge.h"
#include "dispatch/inference_store.h"
#include "pjrt/executable.h"
#include "program/program_store.h"
#include "program/workers.h"

namespace py = pybind11;

namespace lazyxla::bindings {
namespace {

std::vector<int64_t> words(const std::vector<ir::ScalarValue>& slots) {
  std::vector<int64_t> values;
  for (const ir::ScalarValue& slot : slots) values.push_back(slot.i);
  return values;
}

// lazyxla.cache.program_store.StoredGraph.
class PythonStoredGraph final : public program::StoredGraph {
 public:
  explicit PythonStoredGraph(py::object graph) : graph_(owned_without_gil(std::move(graph))) {}

  bool is_kept() override {
    return in_python([&] { return graph_->attr("is_kept")().cast<bool>(); });
  }

  std::optional<Found> find(const std::vector<bool>& wanted, const std::vector<bool>& needed,
                            const std::vector<ir::ScalarValue>& slots) override {
    return in_python([&]() -> std::optional<Found> {
      py::object found = graph_->attr("find")(wanted, needed, words(slots));
      if (found.is_none()) return std::nullopt;
      return Found{found.attr("executable").cast<std::string>(),
                   found.attr("variable").cast<std::vector<bool>>(),
                   found.attr("static_slots").cast<std::vector<uint32_t>>()};
    });
  }

  std::string explain_miss() override {
    return in_python([&] { return graph_->attr("explain_miss")().cast<std::string>(); });
  }

  Added add(const std::vector<bool>& wanted, const std::vector<ir::ScalarValue>& slots,
            const std::vector<uint32_t>& static_slots, const std::string& artifact) override {
    return in_python([&] {
      auto [executable, keep] =
          graph_->attr("add")(wanted, words(slots), static_slots, py::bytes(artifact))
              .cast<std::pair<std::optional<std::string>, py::object>>();
      return Added{std::move(executable),
                   [keep = owned_without_gil(std::move(keep))](const std::string& compiled) {
                     in_python([&] { (*keep)(py::bytes(compiled)); });
                   }};
    });
  }

 private:
  std::shared_ptr<py::object> graph_;
};

// A Python function (portable key or None, compile options) ->
// lazyxla.cache.program_store.StoredGraph or None.
void install_program_store(py::function open) {
  program::program_store = [&function = kept(std::move(open))](
                               const std::optional<std::string>& key, const std::string& options) {
    return in_python([&]() -> std::unique_ptr<program::StoredGraph> {
      py::object bytes = key ? py::object(py::bytes(*key)) : py::none();
      py::object graph = function(bytes, py::bytes(options));
      if (graph.is_none()) return nullptr;
      return std::make_unique<PythonStoredGraph>(std::move(graph));
    });
  };
}

// Functions of lazyxla.cache.shape_store. Operators call them, perhaps while Dynamo traces.
void install_inference_store(py::function find, py::function add) {
  dispatch::install_inference_store(
      {[&function = kept(std::move(find))](const std::string& key) {
         return in_python([&] {
           return call_unwatched(function, py::bytes(key)).cast<std::optional<std::string>>();
         });
       },
       [&function = kept(std::move(add))](const std::string& key, const std::string& answer) {
         in_python([&] { call_unwatched(function, py::bytes(key), py::bytes(answer)); });
       }});
}

}  // namespace

std::shared_ptr<py::object> owned_without_gil(py::object object) {
  return {new py::object(std::move(object)), [](py::object* dead) {
            try {
              program::NeedsInterpreter needs_interpreter;
              py::gil_scoped_acquire gil;
              delete dead;
            } catch (const program::InterpreterEnds&) {
              // nothing is called any more
            }
          }};
}

void bind_cache(py::module_& m) {
  m.def("install_program_store", &install_program_store);
  m.def("install_inference_store", &install_inference_store);
  m.def("warn", [](const std::string& text) { TORCH_WARN(text); });
  m.def("serialize_options",
        [](const CompileOptions& options) { return py::bytes(pjrt::serialize(options)); });
  py::class_<CapturedGraph, std::shared_ptr<CapturedGraph>>(m, "CapturedGraph")
      .def_property_readonly("key",
                             [](const CapturedGraph& graph) -> py::object {
                               return graph.key ? py::object(py::bytes(*graph.key)) : py::none();
                             })
      .def_readonly("variable", &CapturedGraph::variable)
      .def_property_readonly("slots",
                             [](const CapturedGraph& graph) { return words(graph.slots); });
}

}  // namespace lazyxla::bindings
