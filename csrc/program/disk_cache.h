// The disk cache: a directory of named entries that many processes share.
//
// An entry is found by its key, all that it depends on; its name is a word and the checksum of the
// key, "program-<40 digits>". It is a file, {magic, checksum, key, bytes}, whose key is compared in
// full. The file is written under another name first and renamed when it is whole: nobody ever sees
// half of one. One that is damaged, or that is another entry under this name, is removed. One that
// others can write to (common/cache_files.h) is not read. An entry's modification time is when it
// was used last; when all of them together are larger than the bound, the ones not used for the
// longest time go. Files of other names are none of the cache's.
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

// What an entry is found by.
struct EntryKey {
  EntryKey() = default;  // of nothing: it is never found, and never kept
  EntryKey(const std::string& kind, std::string text);

  bool is_empty() const { return name.empty(); }

  std::string name;
  std::string text;
};

class DiskCache {
 public:
  // `directory` can be used (common/cache_files.h). With an empty one the cache is off.
  DiskCache(std::string directory, int64_t max_bytes)
      : directory_(std::move(directory)), max_bytes_(max_bytes) {}

  const std::string& directory() const { return directory_; }
  bool is_on() const { return !directory_.empty() && max_bytes_ > 0; }

  std::optional<std::string> read(const EntryKey& key);
  // Of an entry whose key was not at hand, but its name, which another entry gave.
  std::optional<std::string> read_named(const std::string& name);
  // False if it could not be written.
  bool write(const EntryKey& key, const std::string& bytes);
  // Whether there is a file for it, whatever it holds. Does not count as using it.
  bool contains(const std::string& name) const;
  // The keys of all entries of a kind.
  std::vector<EntryKey> keys(const std::string& kind);

 private:
  struct Entry {
    EntryKey key;
    std::string bytes;
  };

  std::optional<Entry> load(const std::string& name);
  void remove(const std::string& name);
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
