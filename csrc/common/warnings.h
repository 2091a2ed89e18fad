// Warnings of PyTorch's that are kept instead of shown: those about data that is made up, and those
// of another thread, which Python would not see.
#pragma once

#include <c10/util/Exception.h>

#include <vector>

namespace lazyxla {

// Keeps the warnings that this thread raises while it exists.
class KeptWarnings {
 public:
  const std::vector<c10::Warning>& all() const { return handler_.all; }

 private:
  struct Handler final : c10::WarningHandler {
    void process(const c10::Warning& warning) override { all.push_back(warning); }
    std::vector<c10::Warning> all;
  };

  Handler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

}  // namespace lazyxla
