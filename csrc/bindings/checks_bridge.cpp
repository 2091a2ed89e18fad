// The checks of lazyxla/argument_checks, as the recorder calls them.
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "dispatch/checks.h"
#include "dispatch/plain_call.h"

namespace py = pybind11;

namespace lazyxla::bindings {
namespace {

using dispatch::Checks;
using dispatch::OpInfo;

py::dict arguments(const OpInfo& info, c10::ArrayRef<c10::IValue> args) {
  py::dict named;
  for (size_t i = 0; i < args.size(); ++i) {
    const bool is_dtype = info.args[i].is_dtype && args[i].isInt();
    named[py::str(info.handle.schema().arguments()[i].name())] =
        is_dtype ? py::cast(args[i].toScalarType()) : torch::jit::toPyObject(args[i]);
  }
  return named;
}

// Throws as PyTorch's own checks do: without our own lines in the traceback.
[[noreturn]] void throw_verdict(py::error_already_set& error) {
  const auto text = [&] { return py::str(error.value()).cast<std::string>(); };
  const py::object& type = error.type();
  TORCH_CHECK_INDEX(!type.is(py::handle(PyExc_IndexError)), text());
  TORCH_CHECK(!type.is(py::handle(PyExc_RuntimeError)), text());
  throw error;
}

template <typename... More>
py::object call(const py::function& check, const OpInfo& info, c10::ArrayRef<c10::IValue> args,
                More... more) {
  try {
    return call_unwatched(check, arguments(info, args), more...);
  } catch (py::error_already_set& error) {
    throw_verdict(error);
  }
}

using Table = std::map<std::string, py::function>;

Checks::Check check_of(const py::function& function, bool takes_sizes) {
  auto* leaked = new py::function(function);  // operators are called to the end
  return [leaked, takes_sizes](const OpInfo& info, c10::ArrayRef<c10::IValue> args,
                               c10::IntArrayRef sizes) {
    dispatch::PlainScope plain;
    py::gil_scoped_acquire gil;
    if (takes_sizes) {
      call(*leaked, info, args, sizes);
    } else {
      call(*leaked, info, args);
    }
  };
}

auto warnings_of(const py::function& function) {
  auto* leaked = new py::function(function);
  return [leaked](const OpInfo& info, c10::ArrayRef<c10::IValue> args) {
    dispatch::PlainScope plain;
    py::gil_scoped_acquire gil;
    return call(*leaked, info, args).template cast<std::vector<std::string>>();
  };
}

}  // namespace

void bind_checks(py::module_& m) {
  m.def(
      "install_argument_checks",
      [](const std::map<std::string, int>& on_cpu_with, const std::vector<std::string>& not_on_cpu,
         const std::vector<std::string>& numbers, const Table& before, const Table& after,
         const Table& of_numbers, const Table& of_values, const Table& warnings) {
        std::unordered_map<std::string, Checks> checks;
        for (const auto& [name, element] : on_cpu_with) checks[name].on_cpu_with = element;
        for (const std::string& name : not_on_cpu) checks[name].dtypes_by_meta = true;
        for (const std::string& name : numbers) checks[name].numbers = Checks::kAlways;
        const auto enter = [&](const Table& table, Checks::Check Checks::* which) {
          for (const auto& [name, function] : table) {
            checks[name].*which = check_of(function, /*takes_sizes=*/which == &Checks::after);
          }
        };
        enter(before, &Checks::before);
        enter(after, &Checks::after);
        enter(of_numbers, &Checks::of_numbers);
        enter(of_values, &Checks::of_values);
        for (const auto& [name, function] : warnings) {
          checks[name].warnings = warnings_of(function);
        }
        dispatch::set_argument_checks(std::move(checks));
      });
}

}  // namespace lazyxla::bindings
