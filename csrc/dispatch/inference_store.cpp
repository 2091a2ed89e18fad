#include "dispatch/inference_store.h"

#include <cstring>
#include <string_view>

#include "common/bytes.h"
#include "common/hash.h"
#include "common/options.h"

namespace lazyxla::dispatch {
namespace {

constexpr size_t kWriteAtBytes = size_t{1} << 20;

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

uint64_t checksum(std::string_view bytes) {
  std::vector<uint64_t> words((bytes.size() + 7) / 8, 0);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return hash_words(words.data(), words.size()) ^ bytes.size();
}

std::string record(const std::string& key, const std::string& answer) {
  std::string body;
  put<uint32_t>(body, key.size());
  body += key;
  body += answer;
  std::string out;
  put<uint32_t>(out, body.size());
  put<uint64_t>(out, checksum(body));
  return out + body;
}

}  // namespace

InferenceStore& InferenceStore::get() {
  static auto* instance = new InferenceStore();
  return *instance;
}

void InferenceStore::open(std::shared_ptr<InferenceFile> file) {
  flush();
  const auto state = state_.hold();
  state->file.swap(file);
  state->answers.clear();
  state->read = false;
}

size_t InferenceStore::parse(const std::string& records) {
  const auto state = state_.hold();
  ByteReader in{records};
  while (!in.left.empty()) {
    const size_t good = records.size() - in.left.size();
    const uint32_t size = in.take<uint32_t>();
    const uint64_t sum = in.take<uint64_t>();
    const std::string_view body = in.take_bytes(size);
    ByteReader inside{body};
    const std::string key(inside.take_bytes(inside.take<uint32_t>()));
    if (!in.ok || !inside.ok || checksum(body) != sum) return good;
    state->keep(key, std::string(inside.left));
  }
  return records.size();
}

std::optional<Inference> InferenceStore::find(const std::string& key) {
  std::shared_ptr<InferenceFile> unread;
  {
    const auto state = state_.hold();
    if (!std::exchange(state->read, true)) unread = state->file;
  }
  if (unread) {
    const std::string records = unread->read();
    const size_t good = parse(records);
    if (good < records.size()) unread->keep_first(good);
  }
  const auto state = state_.hold();
  const std::string* found = state->answers.find(key);
  return found ? deserialize(*found) : std::nullopt;
}

void InferenceStore::State::keep(const std::string& key, std::string answer) {
  if (!answers.find(key)) {
    answers.insert(key, std::move(answer), static_cast<size_t>(options().max_calls.load()));
  }
}

void InferenceStore::add(const std::string& key, const Inference& inference) {
  bool write = false;
  {
    const auto state = state_.hold();
    std::string answer = serialize(inference);
    state->unwritten += record(key, answer);
    state->keep(key, std::move(answer));
    write = state->unwritten.size() > kWriteAtBytes;
  }
  if (write) flush();
}

void InferenceStore::flush() {
  std::shared_ptr<InferenceFile> file;
  std::string records;
  {
    const auto state = state_.hold();
    file = state->file;
    records = std::exchange(state->unwritten, {});
  }
  if (file && !records.empty()) file->append(records);
}

}  // namespace lazyxla::dispatch
