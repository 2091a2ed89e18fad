#include "dispatch/inference_store.h"

#include <fcntl.h>

#include <cstring>
#include <filesystem>
#include <string_view>

#include "common/bytes.h"
#include "common/cache_files.h"
#include "common/hash.h"
#include "common/options.h"

namespace lazyxla::dispatch {
namespace {

constexpr size_t kMaxFileBytes = size_t{64} << 20;
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
  if (rank > 64) in.ok = false;
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

std::optional<Inference> parse(const std::string& bytes) {
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

void InferenceStore::open(const std::string& path) {
  flush();
  std::lock_guard lock(mutex_);
  path_ = path;
  answers_.clear();
  read_ = path.empty();
}

std::string InferenceStore::title() const {
  return record("", "lazyxla shapes 2 " + std::filesystem::path(path_).filename().string());
}

void InferenceStore::read() {
  read_ = true;
  if (prepare_directory_or_warn(std::filesystem::path(path_).parent_path().string())) {
    path_.clear();  // no place to keep them: they are asked for anew
    return;
  }
  std::optional<std::string> bytes;
  {
    const CacheFile file(path_, O_RDONLY);
    if (!file.is_usable()) return;
    if (file.size() <= kMaxFileBytes) bytes = file.read();
  }
  const size_t good = bytes ? parse_file(*bytes) : 0;
  if (bytes && good == bytes->size()) return;
  // What is appended behind a damaged record would never be read: cut it off.
  const CacheFile file(path_, O_WRONLY);
  if (file.is_usable()) file.cut(good);
}

size_t InferenceStore::parse_file(const std::string& bytes) {
  const std::string title = this->title();
  if (!bytes.starts_with(title)) return 0;
  ByteReader in{bytes};
  while (!in.left.empty()) {
    const size_t good = bytes.size() - in.left.size();
    const uint32_t size = in.take<uint32_t>();
    const uint64_t sum = in.take<uint64_t>();
    const std::string_view body = in.take_bytes(size);
    ByteReader inside{body};
    const std::string key(inside.take_bytes(inside.take<uint32_t>()));
    if (!in.ok || !inside.ok || checksum(body) != sum) return good;
    keep(key, std::string(inside.left));
  }
  return bytes.size();
}

std::optional<Inference> InferenceStore::find(const std::string& key) {
  std::lock_guard lock(mutex_);
  if (!read_) read();
  const std::string* found = answers_.find(key);
  return found ? parse(*found) : std::nullopt;
}

void InferenceStore::keep(const std::string& key, std::string answer) {
  if (!answers_.find(key)) {
    answers_.insert(key, std::move(answer), static_cast<size_t>(options().max_calls.load()));
  }
}

void InferenceStore::add(const std::string& key, const Inference& inference) {
  bool write = false;
  {
    std::lock_guard lock(mutex_);
    if (path_.empty()) return;
    std::string answer = serialize(inference);
    unwritten_ += record(key, answer);
    keep(key, std::move(answer));
    write = unwritten_.size() > kWriteAtBytes;
  }
  if (write) flush();
}

void InferenceStore::flush() {
  std::lock_guard lock(mutex_);
  const std::string records = std::exchange(unwritten_, {});
  if (records.empty() || path_.empty()) return;
  const CacheFile file(path_, O_WRONLY | O_CREAT | O_APPEND);
  if (!file.is_usable() || file.size() > kMaxFileBytes) return;
  // One write per batch: records of several processes then never interleave. A short write leaves
  // a damaged record, which readers recognise. Two processes may both begin the file: a second
  // title is a record like any other.
  file.write(file.size() == 0 ? title() + records : records);
}

}  // namespace lazyxla::dispatch
