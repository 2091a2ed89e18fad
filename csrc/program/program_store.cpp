#include "program/program_store.h"

namespace lazyxla::program {
namespace {

ProgramStore& program_store() {
  static auto* instance = new ProgramStore();
  return *instance;
}

}  // namespace

std::unique_ptr<StoredGraph> open_stored(const std::optional<std::string>& key,
                                         const std::string& options) {
  return program_store()(key, options);
}

void set_program_store(ProgramStore store) { program_store() = std::move(store); }

}  // namespace lazyxla::program
