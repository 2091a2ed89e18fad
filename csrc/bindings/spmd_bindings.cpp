#include "bindings/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "dispatch/gradient_hooks.h"
#include "dispatch/sharded.h"
#include "ir/sharding.h"
#include "program/mesh_devices.h"
#include "program/partition.h"
#include "program/workers.h"

namespace py = pybind11;

namespace lazyxla::bindings {
namespace {

using ir::Mesh;
using ir::Sharding;

// A part of an axis in Python's form: the axis's name, the size of the parts before it, its size.
using Part = std::tuple<std::string, int64_t, int64_t>;

const Mesh* make_mesh(const std::vector<std::pair<std::string, int64_t>>& axes,
                      std::vector<int> devices) {
  std::vector<Mesh::Axis> list;
  for (const auto& [name, size] : axes) list.push_back({name, size});
  return Mesh::get(std::move(list), std::move(devices));
}

const Sharding* make_sharding(const Mesh& mesh, const std::vector<std::vector<size_t>>& axes,
                              std::vector<bool> open) {
  Sharding::Dimensions dimensions;
  for (const auto& of_dimension : axes) {
    dimensions.emplace_back();
    for (size_t axis : of_dimension) {
      dimensions.back().push_back({axis, 1, mesh.axes().at(axis).size});
    }
  }
  return Sharding::get(mesh, std::move(dimensions), std::move(open));
}

using Tiles = std::pair<std::vector<int64_t>, std::vector<std::vector<int64_t>>>;

void install_result_reader(py::function reader) {
  program::set_result_reader(
      [&reader = kept(std::move(reader))](const pjrt::CompiledProgram& program,
                                          const std::vector<size_t>& ranks, size_t partitions) {
        program::NeedsInterpreter needs_interpreter;
        py::gil_scoped_acquire gil;
        std::vector<program::ResultTiles> results;
        try {
          const py::object raw = py::cast(&program, py::return_value_policy::reference);
          for (auto& [tiles, tile_of] : reader(raw, ranks, partitions).cast<std::vector<Tiles>>())
            results.push_back({std::move(tiles), std::move(tile_of)});
        } catch (py::error_already_set& error) {  // which may be kept, and dropped without the GIL
          TORCH_CHECK(false, "lazyxla: ", py::str(error.value()).cast<std::string>());
        }
        return results;
      });
}

std::vector<std::pair<std::string, int64_t>> axes_of(const Mesh& mesh) {
  std::vector<std::pair<std::string, int64_t>> axes;
  for (const Mesh::Axis& axis : mesh.axes()) axes.emplace_back(axis.name, axis.size);
  return axes;
}

}  // namespace

py::tuple spec_of(const Sharding& sharding) {
  py::tuple spec(sharding.rank());
  for (size_t i = 0; i < sharding.rank(); ++i) {
    std::vector<Part> parts;
    for (const ir::AxisPart& part : sharding.dimensions()[i]) {
      parts.emplace_back(sharding.mesh().axes()[part.axis].name, part.before, part.size);
    }
    spec[i] = py::tuple(py::cast(parts));
  }
  return spec;
}

void bind_spmd(py::module_& m) {
  // Never freed.
  py::class_<Mesh, std::unique_ptr<Mesh, py::nodelete>>(m, "Mesh")
      .def_property_readonly("axes", &axes_of)
      .def_property_readonly("devices", &Mesh::devices)
      .def_property_readonly("text", &Mesh::text);
  py::class_<Sharding, std::unique_ptr<Sharding, py::nodelete>>(m, "Sharding")
      .def_property_readonly("mesh", &Sharding::mesh, py::return_value_policy::reference)
      .def_property_readonly("spec", &spec_of)
      .def_property_readonly("text", &Sharding::text)
      .def("shard_shape",
           [](const Sharding& sharding, const std::vector<int64_t>& sizes) {
             const ir::Dims shard = sharding.shard(sizes);
             return std::vector<int64_t>(shard.begin(), shard.end());
           })
      .def_property_readonly("open",
                             [](const Sharding& sharding) {
                               std::vector<bool> open;
                               for (size_t i = 0; i < sharding.rank(); ++i) {
                                 open.push_back(sharding.is_open(i));
                               }
                               return open;
                             })
      .def("tile_of", &Sharding::tile_of);
  m.def("own_positions", [](const Mesh& mesh) { return program::own_devices(mesh).positions; });
  m.def("install_result_reader", &install_result_reader);
  m.def("has_mesh", &Mesh::any);
  m.def("make_mesh", &make_mesh, py::return_value_policy::reference);
  m.def("make_sharding", &make_sharding, py::return_value_policy::reference);
  m.def("find_sharding", &Sharding::find, py::return_value_policy::reference);
  m.def("shard", &dispatch::shard, NoGil());
  m.def("check_shardable", &dispatch::check_shardable, NoGil());
  m.def("set_spreading_hook", [](const py::function& f) { dispatch::set_spreading_hook(f.ptr()); });
  m.def("find_unspread", &dispatch::find_unspread);
  m.def("try_shard", &dispatch::try_shard, NoGil());
  m.def("shard_local", &dispatch::shard_local, NoGil());
  m.def("local_blocks", &dispatch::local_blocks, NoGil());
  m.def("set_local_blocks", &dispatch::set_local_blocks, NoGil());
  m.def("sharding_of", &dispatch::sharding_of, NoGil(), py::return_value_policy::reference);
  m.def("known_sharding", &dispatch::known_sharding, NoGil(), py::return_value_policy::reference);
  m.def("declared_sharding", &dispatch::declared_sharding, NoGil(),
        py::return_value_policy::reference);
}

}  // namespace lazyxla::bindings
