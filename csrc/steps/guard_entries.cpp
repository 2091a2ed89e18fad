// The kinds of guards: which parts of a container, a function, a class or a tensor must be as they
// were.
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <map>

#include "common/compat.h"
#include "steps/guards.h"

namespace lazyxla::steps {
namespace {

using Numbers = std::vector<double>;

bool is_number(PyObject* object) { return PyFloat_CheckExact(object) || PyLong_CheckExact(object); }

std::string quoted(const py::handle& key) {
  return "[" + py::repr(key).cast<std::string>() + "] is another value";
}

// A dict's keys and values, in their order.
class DictEntry final : public Guards::Entry {
 public:
  // Values of `ignored` keys do not matter.
  DictEntry(std::string name, const py::dict& dict, const std::map<std::string, size_t>& varying,
            const py::set& ignored)
      : Entry(std::move(name)), dict_(dict) {
    for (const auto& key : py::list(dict)) {
      py::object value = dict[key];
      int number = kFixed;
      if (ignored.contains(key)) {
        number = kIgnored;
        value = py::none();
      } else if (PyUnicode_CheckExact(key.ptr())) {
        const auto found = varying.find(key.cast<std::string>());
        if (found != varying.end()) number = static_cast<int>(found->second);
      }
      items_.push_back({py::reinterpret_borrow<py::object>(key), std::move(value), number});
    }
  }

  std::string broken(Numbers& numbers) const override {
    // The order of an OrderedDict is no part of its dict, and has no version.
    const uint64_t now = PyODict_Check(dict_.ptr()) ? 0 : version();
    if (now != 0 && now == version_) return "";
    std::string what = compare(numbers);
    if (what.empty()) version_ = now;
    return what;
  }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(dict_.ptr());
    for (const Item& item : items_) {
      Py_VISIT(item.key.ptr());
      Py_VISIT(item.value.ptr());
    }
    return 0;
  }

 private:
  struct Item {
    py::object key, value;
    int number;  // that varies
  };
  static constexpr int kFixed = -1, kIgnored = -2;

  uint64_t version() const { return compat::dict_version(dict_.ptr()); }

  std::string compare(Numbers& numbers) const {
    PyObject* dict = dict_.ptr();
    if (PyDict_GET_SIZE(dict) != static_cast<Py_ssize_t>(items_.size())) {
      return " has more or fewer elements";
    }
    if (items_.empty()) return "";
    if (PyODict_Check(dict)) return broken_order();
    Py_ssize_t at = 0;
    PyObject *key, *value;
    for (size_t i = 0; PyDict_Next(dict, &at, &key, &value); ++i) {
      if (!is_same(items_[i].key.ptr(), key)) return " has other keys";
      if (!holds(items_[i], value, numbers)) return quoted(key);
    }
    return "";
  }

  static bool holds(const Item& item, PyObject* now, Numbers& numbers) {
    if (item.number == kFixed) return is_same(item.value.ptr(), now);
    if (item.number == kIgnored) return true;
    if (!is_number(now)) return false;
    numbers[item.number] = PyFloat_AsDouble(now);
    return !PyErr_Occurred() || (PyErr_Clear(), false);
  }

  // For an OrderedDict, whose order is separate from that of its dict.
  std::string broken_order() const {
    size_t i = 0;
    for (const auto& key : py::list(dict_)) {
      if (i == items_.size() || !is_same(items_[i].key.ptr(), key.ptr())) return " has other keys";
      PyObject* now = PyDict_GetItemWithError(dict_.ptr(), key.ptr());
      if (!now || (items_[i].number != kIgnored && !is_same(items_[i].value.ptr(), now))) {
        return quoted(key);
      }
      ++i;
    }
    return "";
  }

  py::dict dict_;
  std::vector<Item> items_;
  mutable uint64_t version_ = 0;  // at which it was last found to be the same
};

// The elements of a list or a set, in their order.
class ListEntry final : public Guards::Entry {
 public:
  ListEntry(std::string name, const py::object& owner) : Entry(std::move(name)), owner_(owner) {
    for (const auto& each : owner) items_.push_back(py::reinterpret_borrow<py::object>(each));
  }

  std::string broken(Numbers&) const override {
    PyObject* owner = owner_.ptr();
    const auto count = static_cast<Py_ssize_t>(items_.size());
    const char* kDiffers = " has other elements";
    if (PyList_Check(owner)) {
      if (PyList_GET_SIZE(owner) != count) return kDiffers;
      for (Py_ssize_t i = 0; i < count; ++i) {
        if (!is_same(items_[i].ptr(), PyList_GET_ITEM(owner, i))) return kDiffers;
      }
      return "";
    }
    if (PySet_GET_SIZE(owner) != count) return kDiffers;
    size_t i = 0;
    for (const py::handle each : py::reinterpret_borrow<py::set>(owner)) {
      if (!is_same(items_[i++].ptr(), each.ptr())) return kDiffers;
    }
    return "";
  }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(owner_.ptr());
    for (const py::object& item : items_) Py_VISIT(item.ptr());
    return 0;
  }

 private:
  py::object owner_;
  std::vector<py::object> items_;
};

// One entry of a dict: a key's value, or its absence.
class KeyEntry final : public Guards::Entry {
 public:
  KeyEntry(std::string name, const py::dict& dict, const py::object& key)
      : Entry(std::move(name)), dict_(dict), key_(key) {
    if (dict.contains(key)) value_ = dict[key];
  }

  std::string broken(Numbers&) const override {
    PyObject* now = PyDict_GetItemWithError(dict_.ptr(), key_.ptr());
    if (!now) {
      PyErr_Clear();
      return value_ ? " is gone" : "";
    }
    return value_ && is_same(value_.ptr(), now) ? "" : " is another value";
  }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(dict_.ptr());
    Py_VISIT(key_.ptr());
    Py_VISIT(value_.ptr());
    return 0;
  }

 private:
  py::dict dict_;
  py::object key_, value_;
};

class CellEntry final : public Guards::Entry {
 public:
  CellEntry(std::string name, const py::object& cell)
      : Entry(std::move(name)),
        cell_(cell),
        value_(py::reinterpret_borrow<py::object>(PyCell_GET(cell.ptr()))) {}

  std::string broken(Numbers&) const override {
    PyObject* now = PyCell_GET(cell_.ptr());
    const bool same = now && value_ ? is_same(value_.ptr(), now) : now == value_.ptr();
    return same ? "" : " is another value";
  }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(cell_.ptr());
    Py_VISIT(value_.ptr());
    return 0;
  }

 private:
  py::object cell_, value_;
};

// What a function without arguments returns, where nothing else shows what there is.
class CallEntry final : public Guards::Entry {
 public:
  CallEntry(std::string name, const py::object& function)
      : Entry(std::move(name)), function_(function), value_(function()) {}

  std::string broken(Numbers&) const override {
    return is_same(value_.ptr(), function_().ptr()) ? "" : " is another value";
  }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(function_.ptr());
    Py_VISIT(value_.ptr());
    return 0;
  }

 private:
  py::object function_, value_;
};

// A function's code and defaults. (What its defaults and cells hold has guards of its own.)
class FunctionEntry final : public Guards::Entry {
 public:
  FunctionEntry(std::string name, const py::object& function)
      : Entry(std::move(name)), function_(function) {
    for (PyObject* part : parts()) parts_.push_back(py::reinterpret_borrow<py::object>(part));
  }

  std::string broken(Numbers&) const override {
    const auto now = parts();
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i] != parts_[i].ptr()) return " is another function";
    }
    return "";
  }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(function_.ptr());
    for (const py::object& part : parts_) Py_VISIT(part.ptr());
    return 0;
  }

 private:
  std::array<PyObject*, 5> parts() const {
    PyObject* f = function_.ptr();
    return {PyFunction_GET_CODE(f), PyFunction_GET_DEFAULTS(f), PyFunction_GET_KW_DEFAULTS(f),
            PyFunction_GET_CLOSURE(f), attributes_of(f)};
  }

  py::object function_;
  std::vector<py::object> parts_;
};

// That an object is of a class still, and that neither the class nor one of its bases was changed:
// the interpreter gives a class a version number, and a new one after each assignment.
class TypeEntry final : public Guards::Entry {
 public:
  TypeEntry(std::string name, const py::object& object, const py::object& type)
      : Entry(std::move(name)),
        object_(object),
        type_(type),
        attributes_(attributes()),
        version_(version()) {}

  bool is_known() const { return version_ != 0; }

  std::string broken(Numbers&) const override {
    if (!object_.is_none() && Py_TYPE(object_.ptr()) != raw()) return " is of another class";
    if (attributes().ptr() != attributes_.ptr()) return " has another dict of attributes";
    return version() == version_ ? "" : " has a class that was changed";
  }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(object_.ptr());
    Py_VISIT(type_.ptr());
    Py_VISIT(attributes_.ptr());
    return 0;
  }

 private:
  PyTypeObject* raw() const { return reinterpret_cast<PyTypeObject*>(type_.ptr()); }
  // The object's dict, which can be replaced as a whole; null if it has none.
  py::object attributes() const {
    if (object_.is_none()) return {};
    PyObject* dict = PyObject_GenericGetDict(object_.ptr(), nullptr);
    if (!dict) PyErr_Clear();
    return py::reinterpret_steal<py::object>(dict);
  }
  // 0 if the interpreter has no number now.
  unsigned version() const {
    if (!(raw()->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG)) {  // a look-up assigns one
      static PyObject* const name = PyUnicode_InternFromString("forward");
      _PyType_Lookup(raw(), name);
    }
    return raw()->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG ? raw()->tp_version_tag : 0;
  }

  py::object object_, type_, attributes_;
  unsigned version_;
};

class TensorEntry final : public Guards::Entry {
 public:
  TensorEntry(std::string name, const py::object& tensor)
      : Entry(std::move(name)), tensor_(tensor), guard_(THPVariable_Unpack(tensor.ptr())) {
    if (PyObject* found = attributes_of(tensor.ptr())) {
      attributes_ = py::reinterpret_borrow<py::object>(found);
    }
  }

  std::string broken(Numbers&) const override {
    if (attributes_of(tensor_.ptr()) != attributes_.ptr()) return " has other attributes";
    const char* what = guard_.broken(THPVariable_Unpack(tensor_.ptr()), /*which_memory=*/true);
    return what ? std::string(" ") + what : "";
  }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(tensor_.ptr());
    Py_VISIT(attributes_.ptr());
    return 0;
  }

 private:
  py::object tensor_, attributes_;
  TensorGuard guard_;
};

template <typename E, typename... Args>
void add(Guards& guards, std::string name, const Args&... args) {
  guards.add(std::make_unique<E>(std::move(name), args...));
}

}  // namespace

void bind_guards(py::module_& m) {
  py::class_<Guards, std::shared_ptr<Guards>>(m, "StepGuards", garbage_collected<Guards>())
      .def(py::init<>())
      .def("__len__", &Guards::size)
      .def(
          "add_dict",
          [](Guards& guards, std::string name, const py::dict& dict,
             const std::map<std::string, size_t>& varying, const py::set& ignored) {
            size_t count = guards.numbers().size();
            for (const auto& [key, number] : varying) count = std::max(count, number + 1);
            guards.set_numbers(count);
            add<DictEntry>(guards, std::move(name), dict, varying, ignored);
          },
          py::arg("name"), py::arg("dict"), py::arg("varying") = py::dict(),
          py::arg("ignored") = py::set())
      .def("add_list", &add<ListEntry, py::object>)
      .def("add_key", &add<KeyEntry, py::dict, py::object>)
      .def("add_cell", &add<CellEntry, py::object>)
      .def("add_call", &add<CallEntry, py::object>)
      .def("add_function", &add<FunctionEntry, py::object>)
      .def("add_tensor", &add<TensorEntry, py::object>)
      // False if the interpreter cannot detect whether the class changes.
      .def("add_type",
           [](Guards& guards, std::string name, const py::object& object, const py::object& type) {
             auto entry = std::make_unique<TypeEntry>(std::move(name), object, type);
             const bool known = entry->is_known();
             guards.add(std::move(entry));
             return known;
           })
      .def("broken", &Guards::broken)
      .def("numbers", &Guards::numbers);
  m.def("unfit_tensor", [](const at::Tensor& tensor) -> std::optional<std::string> {
    const char* why = unfit(tensor);
    return why ? std::optional<std::string>(why) : std::nullopt;
  });
}

}  // namespace lazyxla::steps
