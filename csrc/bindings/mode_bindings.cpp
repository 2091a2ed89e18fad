#include "bindings/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "dispatch/region_inputs.h"
#include "dispatch/registration.h"
#include "dispatch/settling.h"
#include "dispatch/tensor.h"
#include "graph/devices.h"
#include "graph/execute.h"
#include "graph/run_pending.h"
#include "graph/runner.h"
#include "ir/sharding.h"
#include "pjrt/error.h"
#include "program/buffer.h"
#include "record/flush.h"
#include "record/scope.h"

namespace py = pybind11;

namespace lazyxla::bindings {
namespace {

void flush_all(record::Cause cause) {
  for (c10::DeviceIndex index = 0; index < graph::device_count_bound(); ++index) {
    record::flush(index, cause);
  }
}

void wait_for_all() {
  const c10::DeviceIndex count = graph::device_count_bound();
  for (c10::DeviceIndex index = 0; index < count; ++index) graph::finish_waiting_runs(index);
  // Where there is a mesh, waiting for one device is waiting for all.
  for (c10::DeviceIndex index = 0; index < count; ++index) {
    graph::wait_for(index);
    if (ir::Mesh::any()) return;
  }
}

// sync(wait): all devices; each starts its work before any is waited for.
// A function of Python's C API; traced_call.cpp says why.
PyObject* sync_all(PyObject*, PyObject* wait) {
  HANDLE_TH_ERRORS
  const int waits = PyObject_IsTrue(wait);
  if (waits < 0) throw python_error();
  {
    py::gil_scoped_release no_gil;
    pjrt::check_not_forked();  // there the devices are gone
    flush_all(record::Cause::kSync);
    if (waits) wait_for_all();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef c_functions[] = {{"sync", &sync_all, METH_O, nullptr}, {}};

// Whether a block ends because the program is to end: nothing is compiled any more then. What is
// recorded remains pending.
bool is_interrupt(const py::object& kind) {
  return !kind.is_none() && (PyErr_GivenExceptionMatches(kind.ptr(), PyExc_KeyboardInterrupt) ||
                             PyErr_GivenExceptionMatches(kind.ptr(), PyExc_SystemExit));
}

// The context managers are classes of C++: Python raises KeyboardInterrupt between any two of its
// own instructions, and a scope that was entered and not noted would never be left.

// What setting a mode returns. Entering it confines the mode to the block and the thread.
class ModeSwitch {
 public:
  explicit ModeSwitch(record::Mode mode) : mode_(mode) {
    // What is pending belongs to a program of the previous mode.
    if (record::current_mode() != mode) flush_all(record::Cause::kMode);
    change_ = record::set_mode(mode);
  }
  ~ModeSwitch() {
    if (change_) record::settle(*change_);
  }
  ModeSwitch(const ModeSwitch&) = delete;
  ModeSwitch& operator=(const ModeSwitch&) = delete;

  void enter() {
    if (const auto change = std::move(change_)) record::confine(*change);
    record::enter_scope(mode_, nullptr, /*outermost=*/false);
  }

  void exit(const py::object& kind, const py::object&, const py::object&) {
    record::leave_scope();
    if (is_interrupt(kind)) return;
    py::gil_scoped_release no_gil;
    if (record::current_mode() != mode_) flush_all(record::Cause::kMode);
  }

 private:
  const record::Mode mode_;
  std::shared_ptr<record::ModeChange> change_;  // null once it is a block's; guarded by the GIL
};

void find_tensors(const py::handle& object, int depth, std::vector<at::Tensor>& found) {
  constexpr int kDeepest = 16;
  if (THPVariable_Check(object.ptr())) {
    found.push_back(THPVariable_Unpack(object.ptr()));
  } else if (depth == kDeepest) {
    return;
  } else if (PyTuple_Check(object.ptr()) || PyList_Check(object.ptr())) {
    for (const py::handle& element : py::reinterpret_borrow<py::sequence>(object)) {
      find_tensors(element, depth + 1, found);
    }
  } else if (PyDict_Check(object.ptr())) {
    for (const auto& item : py::reinterpret_borrow<py::dict>(object)) {
      find_tensors(item.second, depth + 1, found);
    }
  }
}

std::vector<at::Tensor> tensors_in(const py::handle& object) {
  std::vector<at::Tensor> found;
  find_tensors(object, 0, found);
  return found;
}

// A compiled region as a block.
class RegionBlock {
 public:
  RegionBlock(std::string name, bool full_graph, std::optional<int64_t> max_programs,
              CompileOptions options)
      : region_(std::make_shared<record::Region>()) {
    region_->name = std::move(name);
    region_->full_graph = full_graph;
    region_->max_programs = max_programs;
    region_->options = std::move(options);
  }

  void enter() {
    const bool outermost = !record::in_region();
    if (outermost) flush_all(record::Cause::kMode);  // not part of the region's program
    record::enter_scope(record::Mode::kLazy, region_, outermost);
  }

  // What the block was called with: tensors, or tuples, lists and dicts of them.
  void give(const py::handle& arguments) {
    const auto scope = record::current_scope();
    if (!scope || !scope->outermost) return;
    auto inputs = std::make_shared<dispatch::RegionInputs>();
    for (const at::Tensor& tensor : tensors_in(arguments)) inputs->add(tensor);
    scope->held = std::move(inputs);
  }

  void exit(const py::object& kind, const py::object&, const py::object&) {
    record::check_scope_is_own();
    struct Leave {
      ~Leave() { record::leave_scope(); }
    } leave;
    if (!record::current_scope()->outermost || is_interrupt(kind)) return;
    py::gil_scoped_release no_gil;
    flush_all(record::Cause::kRegionEnd);
    // Others, such as autograd's threads, may keep the scope for a while.
    record::current_scope()->held.reset();
  }

 private:
  std::shared_ptr<record::Region> region_;
};

// For tests: the state of a tensor's content. Neither runs nor waits for anything.
bool is_pending(const at::Tensor& tensor) {
  ir::Storage& storage = dispatch::storage_of(*tensor.unsafeGetTensorImpl());
  std::lock_guard lock(storage.mutex());
  return storage.is_pending();
}

bool is_ready(const at::Tensor& tensor) {
  ir::Storage& storage = dispatch::storage_of(*tensor.unsafeGetTensorImpl());
  ir::Value value;
  {
    std::lock_guard lock(storage.mutex());
    value = storage.value();
  }
  return value && value.node->is_leaf() && program::buffer_of(*value.node.get()).is_ready();
}

}  // namespace

void bind_modes(py::module_& m) {
  py::enum_<record::Mode>(m, "Mode")
      .value("LAZY", record::Mode::kLazy)
      .value("EAGER", record::Mode::kEager)
      .value("FUSED", record::Mode::kFused);
  py::class_<ModeSwitch>(m, "ModeSwitch")
      .def(py::init<record::Mode>(), NoGil())
      .def("__enter__", &ModeSwitch::enter)
      .def("__exit__", &ModeSwitch::exit);
  py::class_<RegionBlock>(m, "RegionBlock")
      .def(py::init<std::string, bool, std::optional<int64_t>, CompileOptions>())
      .def("__enter__", &RegionBlock::enter, NoGil())
      .def("give", &RegionBlock::give)
      .def("__exit__", &RegionBlock::exit);
  if (PyModule_AddFunctions(m.ptr(), c_functions) < 0) throw py::error_already_set();
  m.def("flush", [] { flush_all(record::Cause::kMode); }, NoGil());
  m.def("current_mode", &record::current_mode);
  m.def("is_pending", &is_pending);
  m.def("is_ready", &is_ready);
  m.def("in_region", &record::in_region);
  m.def("note_model_state", [](const at::Tensor& tensor) {
    if (tensor.has_storage()) dispatch::note_model_state(*tensor.unsafeGetTensorImpl());
  });
  m.def("trace_keys", &graph::trace_keys);
  m.def("traced_keys", &graph::traced_keys);
  m.def("kernel_origin", &dispatch::kernel_origin);
}

}  // namespace lazyxla::bindings
