// Bytes: values one after the other, as the caches' files and keys hold them. Numbers have the
// machine's byte order: a file is read by the kind of machine that wrote it.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace lazyxla {

template <typename T>
void put(std::string& out, T value) {
  static_assert(std::is_arithmetic_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// A text, after its length: different texts never give the same bytes, even with more bytes after
// them.
inline void put_text(std::string& out, std::string_view text) {
  put<uint64_t>(out, text.size());
  out += text;
}

// Takes values off the front of a run of bytes, which must outlive it. `ok` becomes false where it
// ends too early; what is taken from then on is 0, or empty.
struct ByteReader {
  std::string_view left;
  bool ok = true;

  template <typename T>
  T take() {
    static_assert(std::is_arithmetic_v<T>);
    T value{};
    const std::string_view bytes = take_bytes(sizeof value);
    if (ok) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }

  std::string_view take_bytes(size_t n) {
    ok = ok && n <= left.size();
    if (!ok) return {};
    const std::string_view bytes = left.substr(0, n);
    left.remove_prefix(n);
    return bytes;
  }

  // A count of the items that follow, each a byte or more: at most as many as there are bytes.
  uint64_t take_count() {
    const auto count = take<uint64_t>();
    ok = ok && count <= left.size();
    return ok ? count : 0;
  }
};

}  // namespace lazyxla
