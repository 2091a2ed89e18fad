// Guards: whether all that a Python function can reach is as it was.
//
// A training step that was recorded once may be run again without its Python code only if that code
// would do the same. What it does follows from what it reads: the objects that it can reach, the
// state of PyTorch, its arguments. Python (lazyxla/steps/) walks over the objects and adds each one
// here; `broken()` compares them all with what they were, in some ten microseconds, and names the
// first that differs:
//
//     guards.add_dict(optimizer.param_groups[0], "optimizer.param_groups[0]", {"lr": 0})
//     guards.broken()    None; or "optimizer.param_groups[0]['weight_decay'] is another value"
//
// Containers are compared by what they hold: the same objects, or equal numbers and strings. What
// these objects hold has guards of its own. Values of tensors on the device are no guards: they are
// what the recorded program takes.
//
// A *varying* number is one that the program takes as an input: it must exist, and be a number;
// `numbers()` returns it after `broken()`.
//
// Guards own what they compare with. The interpreter's garbage collector sees it (`traverse`). All
// functions are called under the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lazyxla::steps {

namespace py = pybind11;

// For a class that owns Python objects, with `traverse` and `clear`: the garbage collector sees
// them.
template <typename T>
py::custom_type_setup garbage_collected() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject& type = heap_type->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      if (!py::detail::is_holder_constructed(self)) return 0;
      return py::cast<T&>(py::handle(self)).traverse(visit, arg);
    };
    type.tp_clear = [](PyObject* self) {
      if (py::detail::is_holder_constructed(self)) py::cast<T&>(py::handle(self)).clear();
      return 0;
    };
  });
}

// Whether a value is what it was: the same object, or an equal number, string, device or tuple.
bool is_same(PyObject* then, PyObject* now);

// The dict that an object's attributes are in; null if it has none.
PyObject* attributes_of(PyObject* object);

// A tensor's description, to compare with.
class TensorGuard {
 public:
  explicit TensorGuard(const at::Tensor& tensor);
  // Nullptr, or what differs. `which_memory`: whether it must be on the same storage.
  const char* broken(const at::Tensor& tensor, bool which_memory) const;

 private:
  c10::ScalarType dtype_;
  c10::Device device_;
  c10::DispatchKeySet keys_;
  std::vector<int64_t> sizes_, strides_;
  int64_t offset_;
  bool requires_grad_;
  uint64_t storage_ = 0;  // its id, of a tensor of the device
  std::string bytes_;     // of a tensor on the CPU, whose values are Python's to read
};

// Why a tensor cannot be part of a captured step at all; nullptr if it can.
const char* unfit(const at::Tensor& tensor);
// The same of one that is a gradient, of which the guards know nothing else.
const char* unfit_gradient(const at::Tensor& gradient);

class Guards {
 public:
  class Entry {
   public:
    explicit Entry(std::string name) : name(std::move(name)) {}
    virtual ~Entry() = default;
    // Empty, or what differs, as the end of a sentence that begins with the name.
    virtual std::string broken(std::vector<double>& numbers) const = 0;
    int traverse(visitproc visit, void* arg) const;
    const std::string name;

   protected:
    // Owns an object, which may be null, as long as this lives.
    PyObject* hold(py::handle object) {
      held_.push_back(py::reinterpret_borrow<py::object>(object));
      return object.ptr();
    }

   private:
    std::vector<py::object> held_;
  };

  void add(std::unique_ptr<Entry> entry) { entries_.push_back(std::move(entry)); }
  size_t size() const { return entries_.size(); }
  void set_numbers(size_t count) { numbers_.resize(count); }
  const std::vector<double>& numbers() const { return numbers_; }
  // What has changed, in words; empty if nothing has.
  std::string broken();
  int traverse(visitproc visit, void* arg) const;
  void clear() { entries_.clear(); }

 private:
  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<double> numbers_;
};

// A step's arguments. Tensors may be others each time, of the same kind; all else must be the same.
class Signature {
 public:
  // Throws TypeError for an argument that cannot be compared.
  Signature(const py::tuple& args, const py::dict& kwargs);
  // Empty, or what differs. Appends the tensors, in order.
  std::string broken(const py::tuple& args, const py::dict& kwargs,
                     std::vector<at::Tensor>& tensors) const;
  int traverse(visitproc visit, void* arg) const;

 private:
  struct Part {
    enum Kind { kTensor, kTuple, kList, kDict, kValue } kind;
    std::optional<TensorGuard> tensor;
    py::object value;         // kValue
    std::vector<Part> parts;  // of a container
    std::vector<py::object> keys;
  };
  static Part describe(PyObject* object, int depth);
  static std::string compare(const Part& part, PyObject* now, std::vector<at::Tensor>& tensors);
  static int traverse(const Part& part, visitproc visit, void* arg);

  Part args_, kwargs_;
};

// The parts of PyTorch's state that change what Python code or operators do: modes, defaults,
// autocast.
std::vector<uint64_t> torch_state();
// Whether Python code of a mode's takes part in every operator, or tensors may have tangents: no
// step is captured then.
bool torch_modes_active();

void bind_guards(py::module_& m);

}  // namespace lazyxla::steps
