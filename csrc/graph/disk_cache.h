// The disk cache: a directory of named entries that many processes share.
//
// A name is a word and the checksum of all that the entry depends on, "program-<40 digits>". The
// entry is a file, {magic, checksum, name, bytes}, written under another name first and renamed
// when it is whole: nobody ever sees half of one. One that is damaged, or that is another entry
// under this name, is removed. One that others can write to (cache_files.h) is not read. An entry's
// modification time is when it was used last; when all of them together are larger than the bound,
// the ones not used for the longest time go. Files of other names are none of the cache's.
//
// Nothing here throws. What cannot be read is not there; what cannot be written is left, with one
// warning.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace lazyxla::graph {

class DiskCache {
 public:
  // `directory` can be used (cache_files.h). With an empty one the cache is off.
  DiskCache(std::string directory, int64_t max_bytes)
      : directory_(std::move(directory)), max_bytes_(max_bytes) {}

  const std::string& directory() const { return directory_; }
  bool is_on() const { return !directory_.empty() && max_bytes_ > 0; }

  std::optional<std::string> read(const std::string& name);
  // False if it could not be written.
  bool write(const std::string& name, const std::string& bytes);
  // Whether there is a file for it, whatever it holds. Does not count as using it.
  bool contains(const std::string& name) const;
  // The names that begin so.
  std::vector<std::string> names(const std::string& begin) const;
  void remove(const std::string& name);

 private:
  std::string path(const std::string& name) const { return directory_ + "/" + name; }
  void warn(const std::string& reason) const;
  void make_room();

  std::string directory_;
  int64_t max_bytes_;
  std::mutex mutex_;             // guards what follows
  int64_t unchecked_bytes_ = 0;  // written since the directory's size was looked at
  bool checked_ = false;
};

// Warns, once for a directory, that programs cannot be kept there.
void warn_not_kept(const std::string& directory, const std::string& reason);

}  // namespace lazyxla::graph
