#include "program/planner.h"

#include <utility>

namespace lazyxla::program {
namespace {

Planner& known_planner() {
  static auto* instance = new Planner();
  return *instance;
}

}  // namespace

void set_planner(Planner planner) { known_planner() = std::move(planner); }
const Planner& planner() { return known_planner(); }

}  // namespace lazyxla::program
