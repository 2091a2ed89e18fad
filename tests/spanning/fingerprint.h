// Whether two processes have the same program.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace spanning {

// Of a compiled program (an HloModuleProtoWithConfig) for `devices`. Where in its source something
// comes from has no influence, nor whether the program was compiled or loaded: one process may have
// it from a cache, or from another line of the same loop.
uint64_t fingerprint(std::string_view program, const std::string& devices);

}  // namespace spanning
