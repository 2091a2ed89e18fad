// The inference store: the answers of meta functions, kept on disk.
//
// Asking a meta function costs up to a millisecond, and the very first one about a second, since
// PyTorch then imports its reference modules. The answers never change for one version of torch, so
// they are kept in a file and a later process asks nothing.
//
// The file (lazyxla/cache/shape_file.py) is a log of records, each {size, checksum, key, answer}.
// It is cut off at the first record that is damaged.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/bounded_map.h"
#include "common/locks.h"
#include "ir/geometry.h"

namespace lazyxla::dispatch {

// What one call of an operator yields, according to its meta functions.
struct Inference {
  struct Result {
    bool defined;
    ir::Geometry geometry;  // offset unused
  };
  std::vector<Result> results;        // of the functional form, lists flattened
  std::vector<uint32_t> counts;       // per return of the functional form: how many of them
  std::vector<ir::Geometry> written;  // written tensors after the call; empty if not asked
};

class InferenceFile {
 public:
  virtual ~InferenceFile() = default;
  virtual std::string read() = 0;             // all records
  virtual void keep_first(size_t bytes) = 0;  // of the records; the others are dropped
  virtual void append(const std::string& records) = 0;
};

class InferenceStore {
 public:
  static InferenceStore& get();

  // The file to use from now on; it is read when the first answer is looked for.
  void open(std::shared_ptr<InferenceFile> file);

  // `key` is the operator's name and the words of its memo key that mean the same in any process.
  std::optional<Inference> find(const std::string& key);
  void add(const std::string& key, const Inference& inference);

  // Writes what was added since the last time. Called at exit and now and then.
  void flush();

 private:
  // Takes the answers of these records; returns how many bytes are good.
  size_t parse(const std::string& records);

  struct State {
    std::shared_ptr<InferenceFile> file;  // used and dropped without the lock: it may need the GIL
    bool read = false;
    BoundedMap<std::string, std::string> answers;  // serialized
    std::string unwritten;

    void keep(const std::string& key, std::string answer);
  };
  Guarded<State> state_;
};

}  // namespace lazyxla::dispatch
