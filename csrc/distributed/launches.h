// Launches of programs that are for the devices of several processes (graph/partitioned_run.h).
//
// The devices wait for each other in such a program: if one process launches another program, or
// none, they wait for ever, or take other numbers for their own. So the processes of a mesh compare
// what they are about to launch, as those of a group compare collectives (agreement.h): the first
// times that a program follows another one, or always. Other programs, on their own devices, are
// not compared.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <vector>

#include "distributed/comparison.h"

namespace lazyxla::distributed {

struct Launches {
  // Connects the processes of these ranks. Called in all of them; the rank of this one is among
  // them.
  using Connect =
      std::function<c10::intrusive_ptr<c10d::Backend>(const std::vector<int64_t>& ranks)>;
  Connect connect;
  c10::intrusive_ptr<c10d::Store> store;  // shared by all processes
  Comparison comparison;
};

// Compares launches from now on. To be called once the client spans the processes of these ranks.
void compare_launches(Launches launches, const std::vector<int64_t>& ranks);

}  // namespace lazyxla::distributed
