// The environment: what a compiled program depends on besides its graph and its options.
//
// Two processes share programs if their environments are the same text. It is made from a topology
// (pjrt/topology.h), be it that of the devices that run here or one known by its name only, so that
// programs can be compiled for a machine on another one:
//
//     in the environment                            not in it
//     the platform, "tpu", and the device's kind    how many devices there are, and how they are
//     the platform's version: for TPUs this is        connected: a program runs on one device, and
//       the compiler's build                          its options bind it to none of them
//     what the plugin's library tells, its size     which machine it is, and for accelerators its
//     for the CPU: the machine's instruction sets     CPU: they are none of the program's
//     the flags that compilers read, and the        where the plugin's library lies
//       options that all programs get
//     the versions of the lowering
//
// It is a line for each field, to be read by people, too: an environment that is not the same can
// be told from another in words.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "pjrt/topology.h"

namespace lazyxla::graph {

using Fields = std::vector<std::pair<std::string, std::string>>;  // names and values

// `platform` is what programs are lowered for, `lowering` the versions of the lowering.
std::string environment(const std::string& platform, const pjrt::Topology& topology,
                        const Fields& lowering);

// In how many fields two environments differ.
size_t count_differences(const std::string& theirs, const std::string& ours);

// What differs, in words: "torch 2.12.0 instead of 2.13.0".
std::string differences(const std::string& theirs, const std::string& ours);

}  // namespace lazyxla::graph
