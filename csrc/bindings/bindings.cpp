// The Python module lazyxla._C. Each part of the backend adds its functions in a bind_* function of
// its own; Python's lazyxla/ is the only caller and does the argument handling.

#include <ATen/core/Generator.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "bindings/bindings.h"
#include "bindings/lowering_bridge.h"
#include "common/counters.h"
#include "common/fork.h"
#include "common/options.h"
#include "common/user_line.h"
#include "common/waiting.h"
#include "dispatch/device_state.h"
#include "dispatch/dlpack.h"
#include "dispatch/generator.h"
#include "dispatch/host_call.h"
#include "dispatch/host_program.h"
#include "dispatch/memory.h"
#include "dispatch/registration.h"
#include "dispatch/shape_memo.h"
#include "dispatch/tensor.h"
#include "distributed/process_group.h"
#include "graph/devices.h"
#include "graph/memory.h"
#include "graph/runner.h"
#include "ir/storage.h"
#include "pjrt/executable.h"
#include "pjrt/exit.h"
#include "pjrt/runtime.h"
#include "pjrt/shared_client.h"
#include "pjrt/topology.h"
#include "program/buffer.h"
#include "program/program.h"
#include "program/workers.h"
#include "record/batches.h"
#include "record/capture.h"
#include "record/settings.h"

namespace py = pybind11;

namespace lazyxla::bindings {
namespace {

// lazyxla/platforms.py's Platform in the client's form.
pjrt::PluginSpec plugin_spec(const py::handle& platform) {
  pjrt::PluginSpec spec;
  spec.path = platform.attr("path").cast<std::string>();
  spec.platform = platform.attr("name").cast<std::string>();
  spec.hint = platform.attr("hint").cast<std::string>();
  spec.create_options = platform.attr("create_options").cast<pjrt::NamedValues>();
  py::object compile_options = platform.attr("compile_options");
  spec.compile_options = compile_options.cast<decltype(spec.compile_options)>();
  return spec;
}

// `resolve` is called when the first device is used, on any thread, without the GIL.
void set_plugin_provider(py::function resolve) {
  // Leaked: the runtime lives longer than the interpreter.
  auto* provider = new py::function(std::move(resolve));
  pjrt::Runtime::get().set_plugin_provider([provider] {
    py::gil_scoped_acquire gil;
    return plugin_spec((*provider)());
  });
}

pjrt::Client& client() { return pjrt::Runtime::get().client(); }

const pjrt::Device& device(int index) {
  const auto& devices = client().devices();
  TORCH_CHECK_INDEX(index >= 0 && static_cast<size_t>(index) < devices.size(),
                    "lazyxla: device index ", index, " is out of range, there are ", devices.size(),
                    " devices");
  return devices[index];
}

// Whether what is recorded now may call the host: a program that is only captured cannot, unless it
// is for what runs here.
bool takes_host_calls() {
  const auto capture = record::Capture::current();
  return (!capture || capture->runs_here()) && pjrt::Runtime::get().takes_host_handler();
}

// Wraps a function of a device for Python's index, where a negative one is the current device.
template <auto function>
auto on_device(c10::DeviceIndex index) {
  return function(dispatch::resolve_index(index));
}

void bind_runtime(py::module_& m) {
  m.def("set_plugin_provider", &set_plugin_provider);
  pjrt::Runtime::get().set_host_handler("lazyxla.host_call", &pjrt::handler<&dispatch::host_call>);
  dispatch::install_host_programs();
  m.def("takes_host_calls", &takes_host_calls, NoGil());
  m.def(
      "register_ffi_target",
      [](const std::string& name, uintptr_t handler) {
        return pjrt::register_foreign_handler(client().api(), pjrt::Runtime::get().platform(), name,
                                              reinterpret_cast<pjrt::Handler*>(handler));
      },
      NoGil());
  m.def("initialized", &graph::initialized);
  m.def("forked", &forked);
  m.def("platform", [] { return pjrt::Runtime::get().platform(); }, NoGil());
  m.def("compile_options", [] { return client().compile_options(); }, NoGil());
  m.def("platform_version", [] { return client().platform_version(); }, NoGil());
  m.def("device_description", [](int index) { return device(index).description(); }, NoGil());
  m.def("memory_info", on_device<&graph::memory_info>, NoGil());
  m.def("release_kept_memory", &graph::release_kept_memory, NoGil());
  m.def("memory_stats", on_device<&graph::memory_stats>, NoGil());
  m.def("measure_executions", &pjrt::measure_executions);
  m.def("seconds_in_executions", &pjrt::seconds_in_executions);
  m.def("reset_peak_memory_stats", on_device<&graph::reset_peak_memory_stats>, NoGil());
  m.def("reset_accumulated_memory_stats", on_device<&graph::reset_accumulated_memory_stats>,
        NoGil());
}

void bind_devices(py::module_& m) {
  m.def("device_count", &graph::device_count, NoGil());
  m.def("device_count_bound", &graph::device_count_bound);
  m.def("set_device_count_bound", &graph::set_device_count_bound);
  m.def("current_device", &dispatch::current_device);
  m.def("exchange_device", &dispatch::exchange_device);
  m.def("resolve_index", &dispatch::resolve_index);
  m.def("synchronize", &dispatch::synchronize, NoGil());
  m.def("host_view", &dispatch::host_view, NoGil());
  m.def("share_host", &dispatch::share_host, NoGil());
  m.def("shared_api", [] {
    const PJRT_Api* api = nullptr;
    {
      py::gil_scoped_release no_gil;
      api = &pjrt::shared_api();
    }
    return py::capsule(api, "pjrt_c_api");
  });
  m.def("lend", &dispatch::lend, NoGil());
  m.def("borrow", &dispatch::borrow, NoGil());
}

void bind_random(py::module_& m) {
  m.def("default_generator", &dispatch::default_generator, py::return_value_policy::copy);
  m.def("seed_all", &dispatch::seed_all);
  // For tests; operators draw in C++.
  m.def("draw", [](const at::Generator& generator) {
    return at::check_generator<dispatch::Generator>(generator)->draw();
  });
}

// Lets signal handlers run while this thread, the main one, waits in C++.
void watch_signals() {
  waiting::set_signal_check([] {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
}

// Called before the interpreter ends: a thread that compiled or ran something later would crash it.
// In a forked child there are no such threads.
void stop_threads() {
  if (forked()) return;
  waiting::set_signal_check(nullptr);
  record::stop_watching_batches();
  program::stop_workers();
  const auto is_busy = [] {
    bool busy = pjrt::compiling() > 0;
    for (c10::DeviceIndex index = 0; index < graph::device_count_bound(); ++index) {
      busy = busy || graph::has_waiting_runs(index);
    }
    return busy;
  };
  // A user who has pressed Ctrl-C because compiling takes long does not wait for it now.
  for (int i = 0; i < 100 && is_busy(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  pjrt::prepare_to_exit(is_busy());
}

void bind_options(py::module_& m) {
  m.def("set_strict_fallback", [](bool value) { options().strict_fallback = value; });
  m.def("set_strict_host_calls", [](bool value) { options().strict_host_calls = value; });
  m.def("set_check_indices", [](bool value) { options().check_indices = value; });
  m.def("set_blocking", [](bool value) { options().blocking = value; });
  m.def("set_cut_graphs", [](bool value) { options().cut_graphs = value; });
  m.def("set_host_programs", [](bool value) { options().host_programs = value; });
  m.def("set_max_pending_nodes", [](int64_t value) { options().max_pending_nodes = value; });
  m.def("set_xla_options", &record::set_process_options);
  m.def("set_max_programs", [](int64_t value) { options().max_programs = value; });
  m.def("matmul_precision", [] { return static_cast<int>(record::matmul_precision()); });
  m.def("set_max_calls", [](int64_t value) { options().max_calls = value; });
}

void bind_graph(py::module_& m) {
  m.def("install_lowering", &install_lowering);
  m.def("install_listeners", &install_listeners);
  m.def("install_tensor_descriptions", &install_tensor_descriptions);
  m.def("set_library_paths", &set_library_paths);
  m.def("register_operators", &dispatch::register_operators);
  m.def("rule_changed", &dispatch::rule_changed);
  m.def("functional_name", &dispatch::functional_name);
  m.def("counters", [] { return Counters::get().snapshot(); });
  m.def("fallbacks", [] { return Counters::get().fallbacks_by_operator(); });
  m.def("count_loader_wait", [] { ++Counters::get().loader_waits; });
  m.def("reset_counters", [] { Counters::get().reset(); });
  m.def("cached_programs", &program::cached_programs);
  m.def("stop_threads", &stop_threads, NoGil());
  m.def("watch_signals", &watch_signals);
  m.def("cached_shapes", [] { return dispatch::ShapeMemo::get().size(); });
}

// Gives a tensor content without data: a type is all that a captured program needs.
void make_abstract(const at::Tensor& tensor) {
  ir::Storage& storage = dispatch::storage_of(*tensor.unsafeGetTensorImpl());
  ir::Garbage garbage;
  std::lock_guard lock(storage.mutex());
  const ir::Geometry& base = storage.base();
  storage.set_leaf(program::make_abstract_leaf({base.dtype, base.sizes}, storage.sharding()),
                   garbage);
}

// Recording programs without running them: lazyxla/aot.
void bind_capture(py::module_& m) {
  m.def("begin_capture",
        [](std::string platform, bool runs_here, size_t devices, py::object recording) {
          record::Capture::begin(std::make_shared<record::Capture>(
              std::move(platform), runs_here, devices, capture_listener(std::move(recording))));
        });
  m.def("end_capture", [] { record::Capture::end(); });
  m.def("captured_platform", []() -> std::string {
    const auto capture = record::Capture::current();
    return capture ? capture->platform() : "";
  });
  // How many devices the capture's programs may be spread over; 0 without a capture.
  m.def("captured_devices", [] {
    const auto capture = record::Capture::current();
    return capture ? capture->devices() : size_t{0};
  });
  m.def("make_abstract", &make_abstract);
}

// Compiling for devices that are not attached: lazyxla/aot.py.
void bind_topology(py::module_& m) {
  py::class_<pjrt::DeviceDescription>(m, "DeviceDescription")
      .def_readonly("id", &pjrt::DeviceDescription::id)
      .def_readonly("process_index", &pjrt::DeviceDescription::process_index)
      .def_readonly("kind", &pjrt::DeviceDescription::kind)
      .def_readonly("attributes", &pjrt::DeviceDescription::attributes);
  py::class_<pjrt::CompiledProgram, std::shared_ptr<pjrt::CompiledProgram>>(m, "CompiledProgram")
      .def_property_readonly("num_outputs", &pjrt::CompiledProgram::num_outputs)
      .def("memory_stats", &pjrt::CompiledProgram::memory_stats, NoGil())
      .def("cost_analysis", &pjrt::CompiledProgram::cost_analysis, NoGil())
      .def("serialize",
           [](const pjrt::CompiledProgram& program) { return py::bytes(program.serialize()); })
      .def("optimized_program", [](const pjrt::CompiledProgram& program) {
        const auto [format, bytes] = program.optimized_program();
        return std::pair(format, py::bytes(bytes));
      });
  py::class_<pjrt::Topology>(m, "Topology")
      .def(py::init([](const std::string& path, const std::string& name,
                       const pjrt::NamedValues& options) {
             return pjrt::Topology::create(pjrt::Plugin::load(path), name, options);
           }),
           NoGil())
      .def_static(
          "of_client", [] { return pjrt::Topology::of(client()); }, NoGil())
      .def_property_readonly("platform_name", &pjrt::Topology::platform_name)
      .def_property_readonly("platform_version", &pjrt::Topology::platform_version)
      .def_property_readonly("devices", &pjrt::Topology::devices)
      .def_property_readonly("processes", &pjrt::Topology::processes)
      .def_property_readonly("compile_options", &pjrt::Topology::compile_options)
      // Its path, and the versions of PJRT's API, of XLA and of StableHLO.
      .def_property_readonly("plugin",
                             [](const pjrt::Topology& topology) {
                               const pjrt::Plugin& plugin = topology.plugin();
                               return std::tuple(plugin.path(), plugin.api_version(),
                                                 plugin.xla_version(),
                                                 plugin.stablehlo_current_version());
                             })
      .def(
          "compile",
          [](const pjrt::Topology& topology, const std::string& artifact,
             const CompileOptions& options) { return topology.compile(artifact, "mlir", options); },
          NoGil(), py::keep_alive<0, 1>())
      .def("check_options", &pjrt::Topology::check_options, NoGil());
}

}  // namespace
}  // namespace lazyxla::bindings

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ part of lazyxla; not a public interface.";
  lazyxla::bindings::bind_runtime(m);
  lazyxla::bindings::bind_devices(m);
  lazyxla::bindings::bind_random(m);
  lazyxla::bindings::bind_options(m);
  lazyxla::bindings::bind_modes(m);
  lazyxla::bindings::bind_spmd(m);
  lazyxla::bindings::bind_processes(m);
  lazyxla::bindings::bind_steps(m);
  lazyxla::bindings::bind_traced_graph(m);
  lazyxla::bindings::bind_graph(m);
  lazyxla::bindings::bind_capture(m);
  lazyxla::bindings::bind_topology(m);
  lazyxla::bindings::bind_cache(m);
  lazyxla::bindings::bind_checks(m);
  lazyxla::bindings::bind_sparse(m);
  lazyxla::bindings::bind_planner(m);
  lazyxla::distributed::bind_process_group(m);
  lazyxla::ir::register_storage(lazyxla::dispatch::memory_allocator());
  lazyxla::record::watch_optimizer_steps();
}
