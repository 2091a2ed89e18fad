#include "dispatch/inference_store.h"

#include <utility>

#include "common/bytes.h"

namespace lazyxla::dispatch {
namespace {

void put_geometry(std::string& out, const ir::Geometry& g) {
  put<int32_t>(out, static_cast<int32_t>(g.dtype));
  put<uint32_t>(out, g.sizes.size());
  for (int64_t size : g.sizes) put(out, size);
  for (int64_t stride : g.strides) put(out, stride);
}

ir::Geometry take_geometry(ByteReader& in) {
  ir::Geometry g;
  g.dtype = static_cast<c10::ScalarType>(in.take<int32_t>());
  uint32_t rank = in.take<uint32_t>();
  for (uint32_t i = 0; in.ok && i < rank; ++i) g.sizes.push_back(in.take<int64_t>());
  for (uint32_t i = 0; in.ok && i < rank; ++i) g.strides.push_back(in.take<int64_t>());
  return g;
}

std::string serialize(const Inference& inference) {
  std::string out;
  put<uint32_t>(out, inference.results.size());
  for (const auto& result : inference.results) {
    put<uint32_t>(out, result.defined);
    put_geometry(out, result.geometry);
  }
  put<uint32_t>(out, inference.counts.size());
  for (uint32_t count : inference.counts) put(out, count);
  put<uint32_t>(out, inference.written.size());
  for (const ir::Geometry& geometry : inference.written) put_geometry(out, geometry);
  return out;
}

std::optional<Inference> deserialize(const std::string& bytes) {
  ByteReader in{bytes};
  Inference inference;
  uint32_t results = in.take<uint32_t>();
  for (uint32_t i = 0; in.ok && i < results; ++i) {
    bool defined = in.take<uint32_t>() != 0;
    inference.results.push_back({defined, take_geometry(in)});
  }
  uint32_t counts = in.take<uint32_t>();
  for (uint32_t i = 0; in.ok && i < counts; ++i) inference.counts.push_back(in.take<uint32_t>());
  uint32_t written = in.take<uint32_t>();
  for (uint32_t i = 0; in.ok && i < written; ++i) inference.written.push_back(take_geometry(in));
  if (!in.ok || !in.left.empty()) return std::nullopt;
  return inference;
}

InferenceStore& store() {
  static auto* instance = new InferenceStore();
  return *instance;
}

}  // namespace

void install_inference_store(InferenceStore given) { store() = std::move(given); }

std::optional<Inference> find_inference(const std::string& key) {
  const auto found = store().find(key);
  return found ? deserialize(*found) : std::nullopt;
}

void keep_inference(const std::string& key, const Inference& inference) {
  store().add(key, serialize(inference));
}

}  // namespace lazyxla::dispatch
