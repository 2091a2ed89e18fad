// The files of the on-disk caches: which of them may be used, and what is told of the others.
//
// A cache holds code that runs here, so it is used only if nobody else can write to it: a directory
// or file belongs to this user or to root, and neither its group nor others may write to it (in a
// sticky directory, such as /tmp, they may: what is ours there stays ours). The caches share one
// directory for each user, which is made with mode 700, as are those above it that are missing.
//
// What is in a file's place but is no file (a directory, a FIFO, a socket) is left alone, and is
// never waited for. Nothing here throws.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <string>

namespace lazyxla {

// Why something cannot be used: an errno, and the reason in words.
struct Refusal {
  int error;
  std::string reason;
  bool by_others = false;  // others can write to it
};

// Makes a directory of the caches if it is missing. Tells why it cannot be used.
std::optional<Refusal> prepare_directory(const std::string& path);

// The same; warns if others can write to it. What cannot be made is the caller's to tell.
std::optional<Refusal> prepare_directory_or_warn(const std::string& path);

// A file that is open for as long as this exists.
class CacheFile {
 public:
  // `flags` as of open(2); a new file gets mode 600.
  CacheFile(const std::string& path, int flags);
  ~CacheFile();
  CacheFile(const CacheFile&) = delete;
  CacheFile& operator=(const CacheFile&) = delete;

  // It is open, a file, and nobody else can write to it. Else it is as if it were not there; that
  // others can write to it is warned of.
  bool is_usable() const { return fd_ >= 0; }
  size_t size() const { return size_; }  // when it was opened
  // The errno of opening it.
  int error() const { return error_; }

  std::optional<std::string> read() const;
  // Returns an errno; 0 if all was written.
  int write(const std::string& bytes) const;
  void cut(size_t size) const;
  void mark_used() const;  // sets its modification time

 private:
  int fd_;
  int error_ = 0;
  size_t size_ = 0;
};

// Whether something is there that is no file.
bool is_something_else(const std::string& path);

// Warns about a path; once in a process.
void warn_once(const std::string& path, const std::string& text);

}  // namespace lazyxla
