#include "common/cache_files.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>

namespace lazyxla {
namespace {

Refusal refusal(int error) { return {error, std::strerror(error)}; }

// Why others can write to it; nothing if they cannot.
std::optional<Refusal> written_by_others(const struct stat& status) {
  if (status.st_uid != ::geteuid() && status.st_uid != 0) {
    return Refusal{EPERM, "it belongs to another user, number " + std::to_string(status.st_uid),
                   true};
  }
  const bool is_sticky = S_ISDIR(status.st_mode) && (status.st_mode & S_ISVTX);
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) && !is_sticky) {
    char mode[16];
    std::snprintf(mode, sizeof mode, "%o", status.st_mode & 07777);
    return Refusal{EPERM, std::string("other users may write to it, its mode is ") + mode, true};
  }
  return std::nullopt;
}

void warn_of_others(const std::string& path, const Refusal& refusal) {
  warn_once(path, "lazyxla: " + path + " is not used: " + refusal.reason +
                      ", and what is kept there is code that runs here. Make it yours alone "
                      "(chown, chmod go-w), remove it, or set LAZYXLA_CACHE_DIR to another "
                      "directory.");
}

std::optional<Refusal> make_directory(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) == 0) {
    return S_ISDIR(status.st_mode) ? std::nullopt : std::optional(refusal(ENOTDIR));
  }
  if (errno != ENOENT) return refusal(errno);
  const std::string parent = std::filesystem::path(path).parent_path().string();
  if (!parent.empty() && parent != path) {
    if (auto refused = make_directory(parent)) return refused;
  }
  // Another process may be faster.
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return refusal(errno);
  return std::nullopt;
}

}  // namespace

std::optional<Refusal> prepare_directory(const std::string& path) {
  if (auto refused = make_directory(path)) return refused;
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) return refusal(errno);
  if (!S_ISDIR(status.st_mode)) return refusal(ENOTDIR);
  return written_by_others(status);
}

std::optional<Refusal> prepare_directory_or_warn(const std::string& path) {
  auto refused = prepare_directory(path);
  if (refused && refused->by_others) warn_of_others(path, *refused);
  return refused;
}

// O_NONBLOCK: opening a FIFO would wait for its other end.
CacheFile::CacheFile(const std::string& path, int flags)
    : fd_(::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0600)) {
  if (fd_ < 0) {
    error_ = errno;
    return;
  }
  struct stat status{};
  if (::fstat(fd_, &status) != 0) {
    error_ = errno;
  } else if (!S_ISREG(status.st_mode)) {
    error_ = EINVAL;
  } else if (auto refused = written_by_others(status)) {
    error_ = EPERM;
    warn_of_others(path, *refused);
  }
  size_ = static_cast<size_t>(status.st_size);
  if (error_ != 0) ::close(std::exchange(fd_, -1));
}

CacheFile::~CacheFile() {
  if (fd_ >= 0) ::close(fd_);
}

std::optional<std::string> CacheFile::read() const {
  std::string bytes(size_, '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::read(fd_, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return std::nullopt;
    done += static_cast<size_t>(n);
  }
  return bytes;
}

int CacheFile::write(const std::string& bytes) const {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::write(fd_, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return EIO;
    done += static_cast<size_t>(n);
  }
  return 0;
}

void CacheFile::cut(size_t size) const {
  [[maybe_unused]] const int failed = ::ftruncate(fd_, static_cast<off_t>(size));
}

void CacheFile::mark_used() const { ::futimens(fd_, nullptr); }

bool is_something_else(const std::string& path) {
  struct stat status{};
  return ::lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode) &&
         !S_ISLNK(status.st_mode);
}

void warn_once(const std::string& path, const std::string& text) {
  static auto& mutex = *new std::mutex();
  static auto& warned = *new std::set<std::string>();
  {
    std::lock_guard lock(mutex);
    if (!warned.insert(path).second) return;
  }
  TORCH_WARN(text);
}

}  // namespace lazyxla
