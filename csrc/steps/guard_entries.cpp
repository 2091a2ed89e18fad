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
      : Entry(std::move(name)), dict_(hold(dict)) {
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
      items_.push_back({hold(key), hold(value), number});
    }
  }

  std::string broken(Numbers& numbers) const override {
    // The order of an OrderedDict is no part of its dict, and has no version.
    const uint64_t now = PyODict_Check(dict_) ? 0 : compat::dict_version(dict_);
    if (now != 0 && now == version_) return "";
    std::string what = compare(numbers);
    if (what.empty()) version_ = now;
    return what;
  }

 private:
  struct Item {
    PyObject *key, *value;
    int number;  // that varies
  };
  static constexpr int kFixed = -1, kIgnored = -2;

  std::string compare(Numbers& numbers) const {
    if (PyDict_GET_SIZE(dict_) != static_cast<Py_ssize_t>(items_.size())) {
      return " has more or fewer elements";
    }
    if (items_.empty()) return "";
    if (PyODict_Check(dict_)) return broken_order();
    Py_ssize_t at = 0;
    PyObject *key, *value;
    for (size_t i = 0; PyDict_Next(dict_, &at, &key, &value); ++i) {
      if (!is_same(items_[i].key, key)) return " has other keys";
      if (!holds(items_[i], value, numbers)) return quoted(key);
    }
    return "";
  }

  static bool holds(const Item& item, PyObject* now, Numbers& numbers) {
    if (item.number == kFixed) return is_same(item.value, now);
    if (item.number == kIgnored) return true;
    if (!is_number(now)) return false;
    numbers[item.number] = PyFloat_AsDouble(now);
    return !PyErr_Occurred() || (PyErr_Clear(), false);
  }

  // For an OrderedDict, whose order is separate from that of its dict.
  std::string broken_order() const {
    size_t i = 0;
    for (const auto& key : py::list(py::reinterpret_borrow<py::object>(dict_))) {
      if (i == items_.size() || !is_same(items_[i].key, key.ptr())) return " has other keys";
      PyObject* now = PyDict_GetItemWithError(dict_, key.ptr());
      if (!now || (items_[i].number != kIgnored && !is_same(items_[i].value, now))) {
        return quoted(key);
      }
      ++i;
    }
    return "";
  }

  PyObject* dict_;
  std::vector<Item> items_;
  mutable uint64_t version_ = 0;  // at which it was last found to be the same
};

// The elements of a list or a set, in their order.
class ListEntry final : public Guards::Entry {
 public:
  ListEntry(std::string name, const py::object& owner)
      : Entry(std::move(name)), owner_(hold(owner)) {
    for (const auto& each : owner) items_.push_back(hold(each));
  }

  std::string broken(Numbers&) const override {
    const char* kDiffers = " has other elements";
    // A list is this sequence itself.
    const auto now = py::reinterpret_steal<py::object>(PySequence_Fast(owner_, ""));
    if (!now) throw py::error_already_set();
    const auto count = static_cast<Py_ssize_t>(items_.size());
    if (PySequence_Fast_GET_SIZE(now.ptr()) != count) return kDiffers;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!is_same(items_[i], PySequence_Fast_GET_ITEM(now.ptr(), i))) return kDiffers;
    }
    return "";
  }

 private:
  PyObject* owner_;
  std::vector<PyObject*> items_;
};

// A value that is read again: a dict's of a key, a variable's of a closure, what a function
// returns.
class ReadEntry final : public Guards::Entry {
 public:
  using Read = py::object (*)(PyObject* owner, PyObject* key);  // null: there is no value

  ReadEntry(std::string name, Read read, const py::object& owner, const py::object& key)
      : Entry(std::move(name)),
        read_(read),
        owner_(hold(owner)),
        key_(hold(key)),
        value_(hold(read(owner_, key_))) {}

  std::string broken(Numbers&) const override {
    const py::object now = read_(owner_, key_);
    if (!now) return value_ ? " is gone" : "";
    return value_ && is_same(value_, now.ptr()) ? "" : " is another value";
  }

 private:
  const Read read_;
  PyObject *const owner_, *const key_, *const value_;
};

py::object read_key(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (!value) PyErr_Clear();
  return py::reinterpret_borrow<py::object>(value);
}

py::object read_cell(PyObject* cell, PyObject*) {
  return py::reinterpret_borrow<py::object>(PyCell_GET(cell));
}

// Where nothing else shows what there is.
py::object read_call(PyObject* function, PyObject*) { return py::handle(function)(); }

// A function's code and defaults, and its names. (What its defaults and cells hold has guards of
// its own.)
class FunctionEntry final : public Guards::Entry {
 public:
  FunctionEntry(std::string name, const py::object& function)
      : Entry(std::move(name)), function_(hold(function)), parts_(parts()) {
    for (PyObject* part : parts_) hold(part);
  }

  std::string broken(Numbers&) const override {
    return parts() == parts_ ? "" : " is another function";
  }

 private:
  std::array<PyObject*, 9> parts() const {
    const auto* f = reinterpret_cast<PyFunctionObject*>(function_);
    return {f->func_code,    f->func_defaults,         f->func_kwdefaults,
            f->func_closure, attributes_of(function_), f->func_doc,
            f->func_name,    f->func_qualname,         f->func_module};
  }

  PyObject* const function_;
  const std::array<PyObject*, 9> parts_;
};

// That an object is of a class still, and that neither the class nor one of its bases was changed:
// the interpreter gives a class a version number, and a new one after each assignment.
class TypeEntry final : public Guards::Entry {
 public:
  TypeEntry(std::string name, const py::object& object, const py::type& type)
      : Entry(std::move(name)),
        object_(object.is_none() ? nullptr : hold(object)),
        type_(reinterpret_cast<PyTypeObject*>(hold(type))),
        attributes_(hold(attributes())),
        version_(compat::type_version(type_)) {}

  bool is_known() const { return version_ != 0; }

  std::string broken(Numbers&) const override {
    if (object_ && Py_TYPE(object_) != type_) return " is of another class";
    if (attributes().ptr() != attributes_) return " has another dict of attributes";
    return compat::type_version(type_) == version_ ? "" : " has a class that was changed";
  }

 private:
  // The object's dict, which can be replaced as a whole; null if it has none.
  py::object attributes() const {
    if (!object_) return {};
    PyObject* dict = PyObject_GenericGetDict(object_, nullptr);
    if (!dict) PyErr_Clear();
    return py::reinterpret_steal<py::object>(dict);
  }

  PyObject* const object_;
  PyTypeObject* const type_;
  PyObject* const attributes_;
  const unsigned version_;  // 0 if the interpreter has none
};

class TensorEntry final : public Guards::Entry {
 public:
  TensorEntry(std::string name, const py::object& tensor)
      : Entry(std::move(name)),
        tensor_(hold(tensor)),
        attributes_(hold(attributes_of(tensor_))),
        guard_(THPVariable_Unpack(tensor_)) {}

  std::string broken(Numbers&) const override {
    if (attributes_of(tensor_) != attributes_) return " has other attributes";
    const char* what = guard_.broken(THPVariable_Unpack(tensor_), /*which_memory=*/true);
    return what ? std::string(" ") + what : "";
  }

 private:
  PyObject *const tensor_, *const attributes_;
  TensorGuard guard_;
};

template <typename E, typename... Args>
void add(Guards& guards, std::string name, const Args&... args) {
  guards.add(std::make_unique<E>(std::move(name), args...));
}

template <ReadEntry::Read read>
void add_read(Guards& guards, std::string name, const py::object& owner) {
  add<ReadEntry>(guards, std::move(name), read, owner, py::object());
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
      .def("add_key",
           [](Guards& guards, std::string name, const py::dict& dict, const py::object& key) {
             add<ReadEntry>(guards, std::move(name), &read_key, dict, key);
           })
      .def("add_cell", &add_read<&read_cell>)
      .def("add_call", &add_read<&read_call>)
      .def("add_function", &add<FunctionEntry, py::object>)
      .def("add_tensor", &add<TensorEntry, py::object>)
      // False if the interpreter cannot detect whether the class changes.
      .def("add_type",
           [](Guards& guards, std::string name, const py::object& object, const py::type& type) {
             auto entry = std::make_unique<TypeEntry>(std::move(name), object, type);
             const bool known = entry->is_known();
             guards.add(std::move(entry));
             return known;
           })
      .def("broken", &Guards::broken);
  m.def("unfit_tensor", [](const at::Tensor& tensor) -> std::optional<std::string> {
    const char* why = unfit(tensor);
    return why ? std::optional<std::string>(why) : std::nullopt;
  });
}

}  // namespace lazyxla::steps
