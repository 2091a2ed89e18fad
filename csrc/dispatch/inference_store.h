// The inference store: the answers of meta functions, kept on disk (lazyxla/cache/shape_store.py).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

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

  // The first result that is of a written tensor: they come behind the fresh ones. `returns` is
  // OpInfo's.
  size_t first_written(const std::vector<int>& returns) const {
    size_t fresh = 0;
    for (size_t i = 0; i < returns.size(); ++i) {
      if (returns[i] < 0) fresh += counts[i];
    }
    return fresh;
  }
};

struct InferenceStore {
  std::function<std::optional<std::string>(const std::string& key)> find;
  std::function<void(const std::string& key, const std::string& answer)> add;
};

// Once, before operators are registered.
void install_inference_store(InferenceStore store);

// `key` is the operator's name and the words of its memo key that mean the same in any process.
std::optional<Inference> find_inference(const std::string& key);
void keep_inference(const std::string& key, const Inference& inference);

}  // namespace lazyxla::dispatch
