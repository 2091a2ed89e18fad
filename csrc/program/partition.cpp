#include "program/partition.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>

#include "program/graph.h"
#include "program/mesh_devices.h"

namespace lazyxla::program {
namespace {

// Marks the partition in a key; OpSpec ids and other words that begin a section are smaller.
constexpr uint64_t kPartition = uint64_t{3} << 56;

auto& result_reader = *new ResultReader();

void note_mesh(Partition& partition, const ir::Sharding* sharding) {
  if (!sharding) return;
  const ir::Mesh* mesh = &sharding->mesh();
  if (!partition.mesh) partition.mesh = mesh;
  if (partition.mesh != mesh) partition.other = mesh;
}

// Shardings that are needed at every flush, without a look-up by their text.
const ir::Sharding* replicated(const ir::Mesh& mesh, size_t rank) {
  thread_local ska::flat_hash_map<const ir::Mesh*, std::vector<const ir::Sharding*>> known;
  std::vector<const ir::Sharding*>& by_rank = known[&mesh];
  while (by_rank.size() <= rank) {
    by_rank.push_back(ir::Sharding::replicated(mesh, by_rank.size()));
  }
  return by_rank[rank];
}

// Whether an operator must run on a mesh because of what it reads.
bool reads_mesh(const Graph& graph, size_t node) {
  const ir::Node& reader = *graph.nodes[node].get();
  for (size_t i = 0; i < reader.operands().size(); ++i) {
    const uint32_t operand = graph.operand(node, i);
    if (operand >= graph.leaves.size()) continue;
    if (needed_mesh(*reader.spec(), *graph.leaves[operand].get())) return true;
  }
  return false;
}

// Whether anything of the graph is sharded, or is to be.
bool has_mesh(const Graph& graph) {
  const bool reads = std::any_of(
      graph.leaves.begin(), graph.leaves.end(),
      [](const ir::NodePtr& leaf) { return buffer_of(*leaf.get()).sharding() != nullptr; });
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (graph.nodes[i]->spec()->sharding || (reads && reads_mesh(graph, i))) return true;
  }
  return std::any_of(graph.taken.begin(), graph.taken.end(),
                     [](const Taken& taken) { return taken.sharding != nullptr; });
}

// The shardings set by the storages that take the results, or else by the operators that make them.
std::vector<const ir::Sharding*> wanted_results(const Graph& graph) {
  std::vector<const ir::Sharding*> results(graph.promises.size(), nullptr);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const ir::Sharding* sharding = graph.nodes[i]->spec()->sharding;
    if (!sharding || sharding->is_open()) continue;
    for (size_t j = 0; j < results.size(); ++j) {
      if (graph.outputs[j] == graph.values[i]) results[j] = sharding;
    }
  }
  for (const Taken& taken : graph.taken) {
    if (taken.sharding) results[taken.output] = taken.sharding;
  }
  return results;
}

}  // namespace

const ir::Mesh* needed_mesh(const ir::OpSpec& reader, const ir::Node& leaf) {
  const ir::Sharding* sharding = buffer_of(leaf).sharding();
  if (!sharding) return nullptr;
  const ir::Mesh& mesh = sharding->mesh();
  const bool is_everywhere = sharding->is_replicated() && mesh_spans_processes(mesh);
  return is_everywhere && !reader.spreads ? nullptr : &mesh;
}

void set_result_reader(ResultReader reader) { result_reader = std::move(reader); }

void Partition::check() const {
  TORCH_CHECK_VALUE(
      !other,
      "lazyxla: tensors that are sharded over different meshes are part of one "
      "program: ",
      mesh->text(), ", and ", other ? other->text() : "",
      ". Shard them over the same mesh, or move what one computes to the other's with "
      "lazyxla.shard");
}

bool Partition::spans_processes() const { return mesh_spans_processes(*mesh); }

std::string Partition::devices() const { return c10::Join(",", mesh->devices()); }

void Partition::add_to_key(std::vector<uint64_t>& key) const {
  key.push_back(kPartition);
  key.push_back(mesh->id());
  key.push_back(other ? other->id() : 0);
  for (const ir::Sharding* input : inputs) key.push_back(input->id());
  for (const ir::Sharding* result : results) key.push_back(result ? result->id() : 0);
}

std::string Partition::text() const {
  std::string text;
  for (const ir::Sharding* input : inputs) text += input->text() + "\n";
  for (const ir::Sharding* result : results) text += (result ? result->text() : "") + "\n";
  return text;
}

std::vector<const ir::Sharding*> Partition::results_of(const pjrt::CompiledProgram& program) const {
  const std::vector<ResultTiles> all = result_reader(program, ranks, mesh->size());
  TORCH_INTERNAL_ASSERT(all.size() == results.size());
  std::vector<const ir::Sharding*> found;
  for (size_t i = 0; i < all.size(); ++i) {
    const auto* sharding = ir::Sharding::of_tiles(
        *mesh, all[i].tiles, [&](size_t position) { return all[i].tile_of[position]; });
    TORCH_CHECK(sharding && (!results[i] || results[i]->distributes_like(*sharding)),
                "lazyxla: the partitioner spreads a result in a way that is no sharding",
                results[i] ? ", though it was told one: " + results[i]->text() : "");
    found.push_back(results[i] ? results[i] : sharding);
  }
  return found;
}

BufferRef unknown_leaf(const Graph& graph) {
  for (const ir::NodePtr& leaf : graph.leaves) {
    if (buffer_of(*leaf.get()).sharding() == DeviceBuffer::unknown())
      return buffer_ref(*leaf.get());
  }
  return nullptr;
}

void find_partition(Graph& graph) {
  if (!has_mesh(graph)) {
    for (const BufferRef& promise : graph.promises) promise->promise_sharding(nullptr);
    for (size_t i = 0; i < graph.leaves.size(); ++i) {
      // Data that other devices have, too, cannot be donated by this one.
      if (buffer_of(*graph.leaves[i].get()).sharding()) graph.aliases[i] = -1;
    }
    return;
  }
  auto partition = std::make_shared<Partition>();
  for (const ir::NodePtr& leaf : graph.leaves) {
    partition->inputs.push_back(buffer_of(*leaf.get()).sharding());
    note_mesh(*partition, partition->inputs.back());
  }
  partition->results = wanted_results(graph);
  for (const ir::Sharding* result : partition->results) note_mesh(*partition, result);
  for (const ir::NodePtr& node : graph.nodes) note_mesh(*partition, node->spec()->sharding);
  const ir::Mesh& mesh = *partition->mesh;
  for (size_t i = 0; i < graph.leaves.size(); ++i) {
    const ir::Sharding*& input = partition->inputs[i];
    if (!input) {
      input = replicated(mesh, graph.leaves[i]->output_type(0).dims.size());
    }
    if (graph.aliases[i] < 0) continue;
    const ir::Sharding*& result = partition->results[graph.aliases[i]];
    if (!result) result = input;
    if (result != input) graph.aliases[i] = -1;
  }
  for (const ir::TensorType& type : graph.output_types) {
    partition->ranks.push_back(type.dims.size());
  }
  for (size_t i = 0; i < graph.promises.size(); ++i) {
    if (partition->results[i]) graph.promises[i]->promise_sharding(partition->results[i]);
  }
  graph.partition = std::move(partition);
}

}  // namespace lazyxla::program
