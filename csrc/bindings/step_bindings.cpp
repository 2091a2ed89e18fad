#include "bindings/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "record/capture.h"
#include "record/scope.h"
#include "steps/guards.h"
#include "steps/step_program.h"

namespace py = pybind11;

namespace lazyxla::bindings {
namespace {

using steps::Guards, steps::Signature, steps::StepProgram, steps::StepRecording;

// A tensor that programs take in place of a number that varies, such as a learning rate.
class Number {
 public:
  explicit Number(at::Tensor tensor) : tensor_(std::move(tensor)) { set(0); }

  const at::Tensor& tensor() const { return tensor_; }
  void set(double value) {
    if (value_ == value) return;
    steps::set_number(tensor_, value);
    // While programs are captured, it gets no data.
    value_ = record::Capture::current() ? std::nullopt : std::optional(value);
  }

 private:
  const at::Tensor tensor_;
  std::optional<double> value_;  // what it holds
};

// A step that can be run without its Python code, as long as nothing that it reads has changed.
class CapturedStep {
 public:
  // Takes the guards' entries. `numbers`: for each varying number of the guards, its tensor.
  CapturedStep(Guards& guards, const Signature& signature, std::vector<uint64_t> torch_state,
               std::shared_ptr<StepProgram> program, std::vector<std::shared_ptr<Number>> numbers)
      : guards_(std::move(guards)),
        signature_(signature),
        torch_state_(std::move(torch_state)),
        program_(std::move(program)),
        numbers_(std::move(numbers)) {
    TORCH_CHECK(numbers_.size() == guards_.numbers().size(), "lazyxla: numbers without guards");
  }

  // The step's new tensors; or why it cannot be run, in words.
  py::object operator()(const py::tuple& args, const py::dict& kwargs) {
    if (!program_) return py::str("the interpreter is ending");
    if (record::in_region()) return py::str("it is called within a compiled region");
    if (record::Capture::current()) return py::str("programs are captured for another machine");
    if (steps::torch_state() != torch_state_) {
      return py::str("a mode or default of PyTorch's is another one");
    }
    std::vector<at::Tensor> arguments, tensors, made;
    std::string why = signature_.broken(args, kwargs, arguments);
    if (why.empty()) why = guards_.broken();
    if (why.empty()) why = program_->find(arguments, tensors);
    if (!why.empty()) return py::str(why);
    for (size_t i = 0; i < numbers_.size(); ++i) numbers_[i]->set(guards_.numbers()[i]);
    {
      py::gil_scoped_release no_gil;
      why = program_->run(tensors, made);
      arguments.clear();
      tensors.clear();
    }
    if (!why.empty()) return py::str(why);
    program_->keep_gradients(made);
    return py::cast(made);
  }

  int traverse(visitproc visit, void* arg) const {
    if (const int stop = guards_.traverse(visit, arg)) return stop;
    return signature_.traverse(visit, arg);
  }
  void clear() {
    guards_.clear();
    program_ = nullptr;
  }

 private:
  Guards guards_;
  Signature signature_;
  std::vector<uint64_t> torch_state_;
  std::shared_ptr<StepProgram> program_;
  std::vector<std::shared_ptr<Number>> numbers_;
};

// The tensors of a step's arguments, in the order in which its program takes them. Throws TypeError
// if the arguments do not have this signature.
std::vector<at::Tensor> tensors_of(const Signature& signature, const py::tuple& args,
                                   const py::dict& kwargs) {
  std::vector<at::Tensor> tensors;
  const std::string why = signature.broken(args, kwargs, tensors);
  TORCH_CHECK_TYPE(why.empty(), why);
  return tensors;
}

}  // namespace

void bind_steps(py::module_& m) {
  steps::bind_guards(m);
  py::class_<StepProgram, std::shared_ptr<StepProgram>>(m, "StepProgram");
  py::class_<Number, std::shared_ptr<Number>>(m, "StepNumber")
      .def(py::init<at::Tensor>())
      .def_property_readonly("tensor", &Number::tensor)
      .def("set", &Number::set);
  py::class_<Signature>(m, "StepSignature")
      .def(py::init<const py::tuple&, const py::dict&>())
      .def("tensors", &tensors_of);
  py::class_<StepRecording>(m, "StepRecording")
      .def(py::init<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>>())
      .def("finish", &StepRecording::finish)
      .def("stop", &StepRecording::stop);
  py::class_<CapturedStep>(m, "CapturedStep", steps::garbage_collected<CapturedStep>())
      .def(py::init<Guards&, const Signature&, std::vector<uint64_t>, std::shared_ptr<StepProgram>,
                    std::vector<std::shared_ptr<Number>>>())
      .def("__call__", &CapturedStep::operator());
  m.def("torch_modes_active", &steps::torch_modes_active);
  m.def("torch_state", &steps::torch_state);
}

}  // namespace lazyxla::bindings
