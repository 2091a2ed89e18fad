// What a process tells the others when it launches a program: which program, and its arguments.
#pragma once

#include <pjrt_c_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace spanning {

// A buffer's value: its elements in row-major order, and how they lie on the device.
struct Value {
  PJRT_Buffer_Type type;
  std::vector<int64_t> dims;
  std::vector<int64_t> minor_to_major;  // empty: row-major
  std::string data;

  // Waits until the buffer is computed. Throws Failure, of its computation or if it is donated.
  static Value of(PJRT_Buffer* buffer);

  // A buffer of this value. Throws Failure.
  PJRT_Buffer* on(PJRT_Client* client, PJRT_Device* device) const;
};

struct Record {
  uint64_t fingerprint = 0;
  std::string failure;                        // why this process launches nothing, though it was to
  std::vector<std::vector<Value>> arguments;  // of each of the process' devices

  std::string encode() const;
  static Record decode(const std::string& bytes);  // throws std::runtime_error
};

}  // namespace spanning
