// The devices in serialized compile options, which are protocol buffers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace spanning {

// The devices for so many replicas and partitions: those of the first replica, then of the second.
using Assign = std::function<std::vector<int>(int replicas, int partitions)>;

// `options` (a CompileOptionsProto) with the devices that `assign` gives where the options tell
// none, unless the program is for one device of any kind.
std::string with_devices(std::string_view options, const Assign& assign);

}  // namespace spanning
