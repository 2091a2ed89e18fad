// The processes that the client spans, as lazyxla/distributed.py starts it.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <optional>

#include "bindings/bindings.h"
#include "distributed/heartbeat.h"
#include "distributed/launches.h"
#include "pjrt/exit.h"
#include "pjrt/processes.h"
#include "pjrt/runtime.h"

namespace py = pybind11;

namespace lazyxla::bindings {
namespace {

using StoreRef = c10::intrusive_ptr<c10d::Store>;

// `store` is called by a connection of our own: whoever waits in a store keeps other threads from
// it, also in `get`.
void set_processes(int index, int count, StoreRef store, std::chrono::milliseconds timeout) {
  const StoreRef own = store->clone();
  const auto put = [own](const std::string& key, const std::string& value) {
    own->set(key, value);
  };
  // It keeps the store, too, which may be the server.
  const auto try_get = [own, store](const std::string& key) {
    return own->check({key}) ? std::optional(own->get_to_str(key)) : std::nullopt;
  };
  pjrt::Runtime::get().set_processes({index, count, pjrt::KeyValueStore{put, try_get}, timeout});
}

// `connect` takes the ranks of processes and returns what carries their comparisons.
void compare_launches(py::function connect, const std::vector<int64_t>& ranks, StoreRef store,
                      const std::string& comparison) {
  const auto call = [&connect = kept(std::move(connect))](const std::vector<int64_t>& ranks) {
    py::gil_scoped_acquire gil;
    return connect(ranks).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
  distributed::compare_launches({call, std::move(store), distributed::comparison_named(comparison)},
                                ranks);
}

// Until the process exits.
void start_heartbeat(StoreRef store, size_t member, size_t members,
                     std::chrono::milliseconds timeout) {
  distributed::start_heartbeat(std::move(store), member, members, timeout);
  pjrt::call_at_exit(&distributed::stop_heartbeat);
}

pjrt::Client& client() { return pjrt::Runtime::get().client(); }

}  // namespace

void bind_processes(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("client_spans_processes", [] { return client().spans_processes(); }, NoGil());
  m.def("all_device_count", [] { return client().all_devices().size(); }, NoGil());
  m.def("first_device", [] { return client().first_device(); }, NoGil());
  if (!py::hasattr(py::module_::import("torch._C"), "_c10d_init")) return;  // built without c10d
  m.def("set_processes", &set_processes);
  m.def("compare_launches", &compare_launches);
  m.def("start_heartbeat", &start_heartbeat, NoGil());
}

}  // namespace lazyxla::bindings
