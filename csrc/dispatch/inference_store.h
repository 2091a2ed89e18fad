// The inference store: what meta functions answered, kept on disk.
//
// Asking a meta function costs up to a millisecond, and the very first one about a second, since
// PyTorch then imports its reference modules. The answers never change for one version of torch, so
// they are kept in a file and a later process asks nothing.
//
// The file is a log of records, each {size, checksum, key, answer}; a record is appended by one
// write, so that many processes can share the file. The first record is the title: without a key,
// it tells the file's own name, in which the versions are. The file is cut off at the first record
// that is damaged, so one with another title is started anew, as is one that has grown too large. A
// file that cannot be read or written (common/cache_files.h) is no error: the answers are then
// asked for again.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/bounded_map.h"
#include "ir/geometry.h"

namespace lazyxla::dispatch {

// What one call of an operator yields, as its meta functions tell.
struct Inference {
  struct Result {
    bool defined;
    ir::Geometry geometry;  // offset unused
  };
  std::vector<Result> results;        // of the functional form, lists flattened
  std::vector<uint32_t> counts;       // per return of the functional form: how many of them
  std::vector<ir::Geometry> written;  // written tensors after the call; empty if not asked
};

class InferenceStore {
 public:
  static InferenceStore& get();

  // The file to use from now on; it is read when the first answer is looked for, and its directory
  // made. An empty path turns the store off.
  void open(const std::string& path);

  // `key` is the operator's name and the words of its memo key that mean the same in any process.
  std::optional<Inference> find(const std::string& key);
  void add(const std::string& key, const Inference& inference);

  // Writes what was added since the last time. Called at exit and now and then.
  void flush();

 private:
  void read();
  // Takes the answers of a file; returns how many bytes of it are good.
  size_t parse_file(const std::string& bytes);
  std::string title() const;  // the first record of the file

  std::mutex mutex_;
  std::string path_;
  bool read_ = false;
  void keep(const std::string& key, std::string answer);
  BoundedMap<std::string, std::string> answers_;  // serialized
  std::string unwritten_;
};

}  // namespace lazyxla::dispatch
