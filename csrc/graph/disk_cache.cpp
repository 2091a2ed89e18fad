#include "graph/disk_cache.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

namespace lazyxla::graph {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[] = "lazyxla cache 1\n";
constexpr size_t kMagicSize = sizeof(kMagic) - 1;
constexpr size_t kChecksumSize = 40;
constexpr char kUnfinished[] = ".unfinished";

// How long a writer may take. An unfinished file that is older was left by one that was killed.
constexpr auto kLongestWrite = std::chrono::hours(1);

class File {
 public:
  File(const std::string& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0600)) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }

  std::optional<std::string> read(size_t size) const {
    std::string bytes(size, '\0');
    size_t done = 0;
    while (done < size) {
      ssize_t n = ::read(fd_, bytes.data() + done, size - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return std::nullopt;
      done += static_cast<size_t>(n);
    }
    return bytes;
  }

  bool write(const std::string& bytes) const {
    size_t done = 0;
    while (done < bytes.size()) {
      ssize_t n = ::write(fd_, bytes.data() + done, bytes.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      done += static_cast<size_t>(n);
    }
    return true;
  }

 private:
  int fd_;
};

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

std::optional<std::string> DiskCache::read(const std::string& name) {
  if (!is_on()) return std::nullopt;
  File file(path(name), O_RDONLY);
  if (!file.is_open()) return std::nullopt;
  struct stat status{};
  bool good = ::fstat(file.fd(), &status) == 0 && S_ISREG(status.st_mode) &&
              (status.st_uid == ::geteuid() || status.st_uid == 0) &&
              static_cast<size_t>(status.st_size) >= kMagicSize + kChecksumSize;
  std::optional<std::string> bytes;
  if (good) bytes = file.read(static_cast<size_t>(status.st_size));
  if (bytes && bytes->compare(0, kMagicSize, kMagic) == 0) {
    std::string body = bytes->substr(kMagicSize + kChecksumSize);
    if (bytes->compare(kMagicSize, kChecksumSize, c10::sha1(body).str()) == 0) {
      ::futimens(file.fd(), nullptr);  // used now
      return body;
    }
  }
  remove(name);
  return std::nullopt;
}

bool DiskCache::write(const std::string& name, const std::string& bytes) {
  if (!is_on()) return false;
  static std::atomic<int64_t> number{0};
  const std::string unfinished =
      path(name) + "." + std::to_string(::getpid()) + "." + std::to_string(++number) + kUnfinished;
  bool written;
  {
    File file(unfinished, O_WRONLY | O_CREAT | O_EXCL);
    written = file.is_open() && file.write(kMagic + c10::sha1(bytes).str() + bytes);
  }
  if (!written || ::rename(unfinished.c_str(), path(name).c_str()) != 0) {
    int error = errno;
    ::unlink(unfinished.c_str());
    warn(std::strerror(error));
    return false;
  }
  {
    std::lock_guard lock(mutex_);
    unchecked_bytes_ += static_cast<int64_t>(bytes.size());
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

std::vector<std::string> DiskCache::names(const std::string& begin) const {
  std::vector<std::string> found;
  if (!is_on()) return found;
  std::error_code error;
  for (fs::directory_iterator it(directory_, error), end; !error && it != end;
       it.increment(error)) {
    std::string name = it->path().filename().string();
    if (name.starts_with(begin) && !ends_with(name, kUnfinished)) found.push_back(std::move(name));
  }
  return found;
}

void DiskCache::remove(const std::string& name) { ::unlink(path(name).c_str()); }

void DiskCache::warn(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (warned_) return;
    warned_ = true;
  }
  TORCH_WARN("lazyxla: compiled programs cannot be kept in ", directory_, ": ", reason,
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
    Entry entry{it->path(), static_cast<int64_t>(it->file_size(gone)), it->last_write_time(gone)};
    if (gone || !it->is_regular_file(gone)) continue;
    if (ends_with(entry.path.string(), kUnfinished)) {
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
