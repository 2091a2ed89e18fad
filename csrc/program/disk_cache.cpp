#include "program/disk_cache.h"

#include <c10/util/hash.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "common/bytes.h"
#include "common/cache_files.h"

namespace lazyxla::graph {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[] = "lazyxla cache 3\n";
constexpr size_t kMagicSize = sizeof(kMagic) - 1;
constexpr size_t kChecksumSize = 40;
constexpr std::string_view kUnfinished = ".unfinished";

// How long a writer may take. An unfinished file that is older was left by one that was killed.
constexpr auto kLongestWrite = std::chrono::hours(1);

// What is in the file of an entry.
std::string packed(const EntryKey& key, const std::string& bytes) {
  std::string rest;
  put_text(rest, key.text);
  rest += bytes;
  return kMagic + c10::sha1(rest).str() + rest;
}

struct Unpacked {
  std::string key, bytes;
};

// Nothing if the file is damaged.
std::optional<Unpacked> unpack(const std::string& file) {
  const size_t begin = kMagicSize + kChecksumSize;
  if (file.size() < begin || !file.starts_with(kMagic)) return std::nullopt;
  const std::string rest = file.substr(begin);
  if (file.compare(kMagicSize, kChecksumSize, c10::sha1(rest).str()) != 0) return std::nullopt;
  ByteReader in{rest};
  std::string key(in.take_bytes(in.take<uint64_t>()));
  if (!in.ok) return std::nullopt;
  return Unpacked{std::move(key), std::string(in.left)};
}

enum class Kind { kEntry, kUnfinished, kForeign };

// What a file is, by its name: "word-<checksum>", perhaps ".<number>.<number>.unfinished".
Kind kind_of(std::string_view name) {
  const size_t dash = name.find('-');
  if (dash == 0 || dash == std::string_view::npos) return Kind::kForeign;
  const std::string_view checksum = name.substr(dash + 1, kChecksumSize);
  if (checksum.size() != kChecksumSize ||
      checksum.find_first_not_of("0123456789abcdef") != std::string_view::npos) {
    return Kind::kForeign;
  }
  const std::string_view rest = name.substr(dash + 1 + kChecksumSize);
  if (rest.empty()) return Kind::kEntry;
  return rest.starts_with('.') && rest.ends_with(kUnfinished) ? Kind::kUnfinished : Kind::kForeign;
}

}  // namespace

EntryKey::EntryKey(const std::string& kind, std::string text)
    : name(kind + "-" + c10::sha1(text).str()), text(std::move(text)) {}

// The entry in the file of this name. One that is damaged, or has another name, is removed.
std::optional<DiskCache::Entry> DiskCache::load(const std::string& name) {
  if (!is_on() || name.empty()) return std::nullopt;
  const CacheFile file(path(name), O_RDONLY);
  if (!file.is_usable()) return std::nullopt;
  if (const auto content = file.read()) {
    if (auto unpacked = unpack(*content)) {
      Entry entry{EntryKey(name.substr(0, name.find('-')), std::move(unpacked->key)),
                  std::move(unpacked->bytes)};
      if (entry.key.name == name) {
        file.mark_used();
        return entry;
      }
    }
  }
  remove(name);
  return std::nullopt;
}

std::optional<std::string> DiskCache::read(const EntryKey& key) {
  auto entry = load(key.name);
  if (!entry || entry->key.text != key.text) return std::nullopt;
  return std::move(entry->bytes);
}

std::optional<std::string> DiskCache::read_named(const std::string& name) {
  auto entry = load(name);
  if (!entry) return std::nullopt;
  return std::move(entry->bytes);
}

bool DiskCache::write(const EntryKey& key, const std::string& bytes) {
  if (!is_on() || key.is_empty()) return false;
  const std::string& name = key.name;
  if (is_something_else(path(name))) {
    warn(name + " is no file");
    return false;
  }
  static std::atomic<int64_t> number{0};
  const std::string unfinished = path(name) + "." + std::to_string(::getpid()) + "." +
                                 std::to_string(++number) + std::string(kUnfinished);
  int error;
  {
    const CacheFile file(unfinished, O_WRONLY | O_CREAT | O_EXCL);
    error = file.is_usable() ? file.write(packed(key, bytes)) : file.error();
  }
  if (error == 0 && ::rename(unfinished.c_str(), path(name).c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(unfinished.c_str());
    warn(std::strerror(error));
    return false;
  }
  {
    std::lock_guard lock(mutex_);
    unchecked_bytes_ += static_cast<int64_t>(key.text.size() + bytes.size());
    // The first time, for what other processes left; then whenever it may have grown by a tenth.
    if (checked_ && unchecked_bytes_ < max_bytes_ / 10) return true;
    checked_ = true;
    unchecked_bytes_ = 0;
  }
  make_room();
  return true;
}

bool DiskCache::contains(const std::string& name) const {
  return is_on() && ::access(path(name).c_str(), F_OK) == 0;
}

std::vector<EntryKey> DiskCache::keys(const std::string& kind) {
  std::vector<EntryKey> found;
  if (!is_on()) return found;
  std::error_code error;
  for (fs::directory_iterator it(directory_, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(kind + "-") || kind_of(name) != Kind::kEntry) continue;
    if (auto entry = load(name)) found.push_back(std::move(entry->key));
  }
  return found;
}

void DiskCache::remove(const std::string& name) { ::unlink(path(name).c_str()); }

void DiskCache::warn(const std::string& reason) const { warn_not_kept(directory_, reason); }

void warn_not_kept(const std::string& directory, const std::string& reason) {
  warn_once(directory,
            "lazyxla: compiled programs cannot be kept in " + directory + ": " + reason +
                ". The next process compiles them again; set LAZYXLA_CACHE_DIR to a directory that "
                "can be written, or LAZYXLA_CACHE_SIZE=0 to do without.");
}

void DiskCache::make_room() {
  struct Entry {
    fs::path path;
    int64_t size;
    fs::file_time_type used;
  };
  std::vector<Entry> entries;
  int64_t total = 0;
  std::error_code error;  // entries may vanish at any time: other processes do the same
  const auto now = fs::file_time_type::clock::now();
  for (fs::directory_iterator it(directory_, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code gone;
    const Kind kind = kind_of(it->path().filename().string());
    if (kind == Kind::kForeign || !fs::is_regular_file(it->symlink_status(gone))) continue;
    Entry entry{it->path(), static_cast<int64_t>(it->file_size(gone)), it->last_write_time(gone)};
    if (gone) continue;
    if (kind == Kind::kUnfinished) {
      if (now - entry.used > kLongestWrite) fs::remove(entry.path, gone);
      continue;
    }
    total += entry.size;
    entries.push_back(std::move(entry));
  }
  if (total <= max_bytes_) return;
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.used < b.used; });
  for (const Entry& entry : entries) {
    if (total <= max_bytes_ / 4 * 3) break;
    std::error_code gone;
    if (fs::remove(entry.path, gone)) total -= entry.size;
  }
}

}  // namespace lazyxla::graph
