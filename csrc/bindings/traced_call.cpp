#include "bindings/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <span>
#include <tuple>

#include "common/locks.h"
#include "dispatch/recorder.h"
#include "dispatch/tensor.h"
#include "dispatch/traced_graph.h"
#include "dispatch/traced_tensor.h"
#include "pjrt/client.h"
#include "pjrt/error.h"
#include "pjrt/runtime.h"

namespace py = pybind11;

namespace lazyxla::bindings {
namespace {

using dispatch::TracedGraph;

// A compiled function as AOTAutograd calls it: with a list of arguments that it may empty. The list
// may also hold what is not a tensor of the graph (a size, an unused argument).
class TracedCall {
 public:
  // One element of the list that a call returns.
  struct Return {
    enum Kind { kResult, kArgument, kConstant } kind;
    size_t index;  // among the graph's results, the arguments or the constants
  };

  // `positions`: for every input of the graph, its index among the arguments.
  TracedCall(TracedGraph::Description description, std::vector<uint32_t> positions,
             std::vector<Return> returns, py::list constants)
      : graph_(std::move(description)),
        positions_(std::move(positions)),
        returns_(std::move(returns)),
        constants_(std::move(constants)) {}

  py::list operator()(const py::list& args) const {
    c10::SmallVector<c10::TensorImpl*, 64> inputs;
    for (size_t i = 0; i < positions_.size(); ++i) inputs.push_back(input(args, i));
    std::vector<at::TensorBase> results;
    {
      py::gil_scoped_release no_gil;
      results = graph_.record(inputs);
    }
    py::list returned(returns_.size());
    for (size_t i = 0; i < returns_.size(); ++i) {
      PyList_SET_ITEM(returned.ptr(), static_cast<Py_ssize_t>(i),
                      element(returns_[i], args, results));
    }
    // Boxed: the arguments are dropped before anything runs, so that their memory can be donated.
    PyList_SetSlice(args.ptr(), 0, PyList_GET_SIZE(args.ptr()), nullptr);
    py::gil_scoped_release no_gil;
    dispatch::after_recording(graph_.device(), graph_.id());
    return returned;
  }

 private:
  c10::TensorImpl* input(const py::list& args, size_t i) const {
    PyObject* object = PyList_GetItem(args.ptr(), positions_[i]);  // borrowed
    if (object == nullptr) throw py::error_already_set();
    TORCH_CHECK_TYPE(THPVariable_Check(object), "lazyxla: argument ", positions_[i],
                     " of a compiled graph must be a tensor, not ", Py_TYPE(object)->tp_name);
    c10::TensorImpl* tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
    c10::Device expected = graph_.inputs()[i] ? c10::Device(c10::DeviceType::CPU)
                                              : c10::Device(c10::kPrivateUse1, graph_.device());
    TORCH_CHECK(tensor->device() == expected, "lazyxla: argument ", positions_[i],
                " of a compiled graph was on ", expected, " when it was traced, now it is on ",
                tensor->device());
    return tensor;
  }

  PyObject* element(const Return& what, const py::list& args,
                    std::vector<at::TensorBase>& results) const {
    switch (what.kind) {
      case Return::kResult:
        return THPVariable_Wrap(at::Tensor(results[what.index]));
      case Return::kArgument:
        return Py_NewRef(PyList_GET_ITEM(args.ptr(), static_cast<Py_ssize_t>(what.index)));
      case Return::kConstant:
        return Py_NewRef(PyList_GET_ITEM(constants_.ptr(), static_cast<Py_ssize_t>(what.index)));
    }
    return Py_NewRef(Py_None);
  }

  TracedGraph graph_;
  std::vector<uint32_t> positions_;
  std::vector<Return> returns_;
  py::list constants_;
};

// A TracedCall as a function of Python's C API: after a large program pybind11's dispatcher is not
// in the processor's caches, and takes 5 to 8 us of a call's 30.
PyObject* call(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyList_Check(args), "lazyxla: a compiled graph takes a list, not ",
                   Py_TYPE(args)->tp_name);
  const auto& traced = *static_cast<TracedCall*>(PyCapsule_GetPointer(self, nullptr));
  return traced(py::reinterpret_borrow<py::list>(args)).release().ptr();
  END_HANDLE_TH_ERRORS
}

py::object function_of(std::unique_ptr<TracedCall> traced) {
  static PyMethodDef method{"traced_call", &call, METH_O, nullptr};
  py::capsule self(traced.release(), [](void* data) { delete static_cast<TracedCall*>(data); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

// (dtype, sizes, strides) of a tensor.
using TensorMeta = std::tuple<c10::ScalarType, std::vector<int64_t>, std::vector<int64_t>>;

// (position among the arguments, dtype if it is a number, whether that stands for a Python number).
using InputMeta = std::tuple<uint32_t, std::optional<c10::ScalarType>, bool>;

py::object make_call(int64_t number, std::string content, uint32_t operators, int64_t device,
                     const std::vector<InputMeta>& inputs, const std::vector<TensorMeta>& outputs,
                     const std::vector<std::tuple<TensorMeta, int64_t, uint32_t, int32_t>>& results,
                     const std::vector<std::pair<uint32_t, uint32_t>>& writes,
                     const std::vector<std::pair<std::string, size_t>>& returns, py::list constants,
                     bool random, CompileOptions options) {
  TracedGraph::Description d{.number = number,
                             .content = std::move(content),
                             .operators = operators,
                             .device = static_cast<c10::DeviceIndex>(device),
                             .random = random,
                             .options = std::move(options)};
  std::vector<uint32_t> positions;
  for (const auto& [position, dtype, wrapped] : inputs) {
    positions.push_back(position);
    d.inputs.push_back(dtype ? TracedGraph::Input(TracedGraph::number(*dtype, wrapped))
                             : std::nullopt);
  }
  for (const auto& [dtype, sizes, strides] : outputs) {
    d.outputs.push_back({dtype, {sizes.begin(), sizes.end()}});
  }
  for (const auto& [meta, offset, output, base] : results) {
    const auto& [dtype, sizes, strides] = meta;
    d.results.push_back(
        {{dtype, {sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, offset},
         output,
         base});
  }
  for (const auto& [input, output] : writes) d.writes.push_back({input, output});
  std::vector<TracedCall::Return> layout;
  for (const auto& [kind, index] : returns) {
    layout.push_back({kind == "result"     ? TracedCall::Return::kResult
                      : kind == "argument" ? TracedCall::Return::kArgument
                                           : TracedCall::Return::kConstant,
                      index});
  }
  return function_of(std::make_unique<TracedCall>(std::move(d), std::move(positions),
                                                  std::move(layout), std::move(constants)));
}

// Arguments of a compiled function that share memory, if it writes to one of them.
//
// Such a function is asked at each call, so it looks only at which storage a tensor is in, and
// where in it: a group of arguments is reported if one is written and the ranges of two intersect.
class SharedArguments {
 public:
  SharedArguments(size_t count, const std::vector<uint32_t>& written) : written_(count, false) {
    for (uint32_t position : written) written_.at(position) = true;
  }

  // The positions in the tuple, by storage; empty if there are none.
  std::vector<uint32_t> find(PyObject* args) const {
    c10::SmallVector<Range, 64> ranges;
    const auto count = std::min(static_cast<size_t>(PyTuple_GET_SIZE(args)), written_.size());
    for (uint32_t i = 0; i < count; ++i) {
      PyObject* object = PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(i));
      if (!THPVariable_Check(object)) continue;
      const at::Tensor& tensor = THPVariable_Unpack(object);
      if (!tensor.has_storage() || tensor.numel() == 0) continue;
      ranges.push_back({tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), i});
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
      return std::tie(a.storage, a.position) < std::tie(b.storage, b.position);
    });
    std::vector<uint32_t> found;
    for (auto first = ranges.begin(), last = first; first != ranges.end(); first = last) {
      last = std::find_if(first, ranges.end(),
                          [&](const Range& r) { return r.storage != first->storage; });
      if (last - first > 1) add_group(args, {first, last}, found);
    }
    return found;
  }

 private:
  struct Range {
    const c10::StorageImpl* storage;
    uint32_t position;
    int64_t begin = 0, end = 0;  // in bytes
  };

  void add_group(PyObject* args, std::span<Range> group, std::vector<uint32_t>& found) const {
    if (std::none_of(group.begin(), group.end(),
                     [this](const Range& r) { return written_[r.position]; })) {
      return;
    }
    const size_t before = found.size();
    for (Range& r : group) {
      const at::Tensor& t =
          THPVariable_Unpack(PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(r.position)));
      int64_t last = 0;
      for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
      const auto width = static_cast<int64_t>(t.itemsize());
      r.begin = t.storage_offset() * width;
      r.end = r.begin + (last + 1) * width;
      found.push_back(r.position);
    }
    std::sort(group.begin(), group.end(),
              [](const Range& a, const Range& b) { return a.begin < b.begin; });
    const auto intersect = [](const Range& a, const Range& b) { return b.begin < a.end; };
    if (std::adjacent_find(group.begin(), group.end(), intersect) == group.end()) {
      found.resize(before);
    }
  }

  std::vector<bool> written_;
};

PyObject* find_shared(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  const auto& shared = *static_cast<SharedArguments*>(PyCapsule_GetPointer(self, nullptr));
  const std::vector<uint32_t> found = shared.find(args);
  if (found.empty()) Py_RETURN_NONE;
  return py::cast(found).release().ptr();
  END_HANDLE_TH_ERRORS
}

py::object make_shared_arguments(size_t count, const std::vector<uint32_t>& written) {
  static PyMethodDef method{"shared_arguments", &find_shared, METH_VARARGS, nullptr};
  py::capsule self(new SharedArguments(count, written),
                   [](void* data) { delete static_cast<SharedArguments*>(data); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

void check_compile_options(const CompileOptions& options) {
  try {
    pjrt::Runtime::get().client().check_options(options);
  } catch (const pjrt::Error& e) {
    TORCH_CHECK_VALUE(false, e.what());
  }
}

// Graphs that can no longer be lowered. They die on any thread, at any point, so the interpreter is
// asked to call Python between two of its instructions.
class DroppedGraphs {
 public:
  static DroppedGraphs& get() {
    static auto* instance = new DroppedGraphs();
    return *instance;
  }

  void set_forget(py::function forget) { forget_ = new py::function(std::move(forget)); }

  void add(int64_t number) {
    numbers_.hold()->push_back(number);
    if (!Py_IsInitialized() || scheduled_.exchange(true)) return;
    if (Py_AddPendingCall(&DroppedGraphs::report_to_python, nullptr) != 0) scheduled_ = false;
  }

 private:
  static int report_to_python(void*) {
    DroppedGraphs& self = get();
    self.scheduled_ = false;  // before the look: what is added later is for the next call
    const std::vector<int64_t> numbers = std::exchange(*self.numbers_.hold(), {});
    for (int64_t number : numbers) {
      try {
        (*self.forget_)(number);
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("forgetting a compiled graph");
      }
    }
    return 0;
  }

  Guarded<std::vector<int64_t>> numbers_;
  std::atomic<bool> scheduled_{false};
  py::function* forget_ = nullptr;  // leaked: graphs may die until the process ends
};

}  // namespace

void bind_traced_graph(py::module_& m) {
  m.def("traced_call", &make_call, py::kw_only(), py::arg("number"), py::arg("content"),
        py::arg("operators"), py::arg("device"), py::arg("inputs"), py::arg("outputs"),
        py::arg("results"), py::arg("writes"), py::arg("returns"), py::arg("constants"),
        py::arg("random"), py::arg("options"));
  m.def("shared_arguments", &make_shared_arguments, py::arg("count"), py::arg("written"));
  m.def("trace_for_lazyxla", &dispatch::trace_for_lazyxla);
  m.def("check_compile_options", &check_compile_options, py::call_guard<py::gil_scoped_release>());
  m.def("on_graph_dropped", [](py::function forget) {
    DroppedGraphs::get().set_forget(std::move(forget));
    dispatch::set_graph_dropped([](int64_t number) { DroppedGraphs::get().add(number); });
  });
}

}  // namespace lazyxla::bindings
