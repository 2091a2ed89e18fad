// Protocol buffers in their wire format: compile options and HLO modules, without XLA's classes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace spanning::wire {

// How the wire format says what follows a field's number.
enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

struct Field {
  uint64_t number;
  uint64_t value;          // of a varint
  std::string_view bytes;  // of a message or string
};

class Reader {
 public:
  explicit Reader(std::string_view message) : rest_(message) {}

  // Whether there is another field, which is then read.
  bool next(Field& field) {
    if (rest_.empty()) return false;
    const uint64_t key = varint();
    field = Field{key >> 3, 0, {}};
    switch (key & 7) {
      case kVarint:
        field.value = varint();
        break;
      case kFixed64:
        take(8);
        break;
      case kBytes:
        field.bytes = take(varint());
        break;
      case kFixed32:
        take(4);
        break;
      default:
        throw std::runtime_error("a message that is no protocol buffer");
    }
    return true;
  }

 private:
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) break;
    }
    return value;
  }

  std::string_view take(size_t size) {
    if (size > rest_.size()) throw std::runtime_error("a message that ends too early");
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  std::string_view rest_;
};

struct Writer {
  std::string data;

  void varint(int field, uint64_t value) {
    number(static_cast<uint64_t>(field) << 3 | kVarint);
    number(value);
  }
  void bytes(int field, std::string_view value) {
    number(static_cast<uint64_t>(field) << 3 | kBytes);
    number(value.size());
    data += value;
  }

 private:
  void number(uint64_t value) {
    for (; value >= 0x80; value >>= 7) data += static_cast<char>(value | 0x80);
    data += static_cast<char>(value);
  }
};

}  // namespace spanning::wire
