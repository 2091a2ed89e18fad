#include "pjrt/kept_blocks.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/locks.h"
#include "pjrt/host_memory.h"

namespace lazyxla::pjrt {

namespace {

constexpr size_t kUnit = 2 << 20;      // sizes and addresses are multiples: a huge page
constexpr size_t kLeast = 16 << 20;    // smaller blocks are malloc's
constexpr size_t kMostKept = 1 << 30;  // in all

struct Block {
  void* address;
  size_t size;
};

struct Blocks {
  std::unordered_map<void*, size_t> used;
  std::vector<Block> kept;  // the one freed last is the last
  size_t kept_bytes = 0;
};

// Leaked: the plugin's threads outlive static variables.
auto& blocks = *new Guarded<Blocks>();

void* map(size_t size) {
  constexpr int kProtection = PROT_READ | PROT_WRITE, kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* const start = mmap(nullptr, size + kUnit, kProtection, kFlags, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  char* const first = static_cast<char*>(start);
  const size_t before = -reinterpret_cast<uintptr_t>(first) % kUnit;
  if (before > 0) munmap(first, before);
  munmap(first + before + size, kUnit - before);
  madvise(first + before, size, MADV_HUGEPAGE);  // may be refused
  return first + before;
}

// Takes a kept block of `size` or little more, the one freed last; null if there is none.
void* take_kept(Blocks& all, size_t size) {
  const auto fits = [size](const Block& block) {
    return block.size >= size && block.size <= size + size / 8;
  };
  const auto found = std::find_if(all.kept.rbegin(), all.kept.rend(), fits);
  if (found == all.kept.rend()) return nullptr;
  const Block block = *found;
  all.kept.erase(std::next(found).base());
  all.kept_bytes -= block.size;
  all.used.emplace(block.address, block.size);
  return block.address;
}

void unmap(const std::vector<Block>& some) {
  for (const Block& block : some) munmap(block.address, block.size);
}

int allocate(void** result, size_t alignment, size_t bytes) {
  if (bytes < kLeast || bytes > SIZE_MAX / 2 || alignment > kUnit) {
    return posix_memalign(result, alignment, bytes);
  }
  const size_t size = (bytes + kUnit - 1) / kUnit * kUnit;
  *result = take_kept(*blocks.hold(), size);
  if (*result != nullptr) return 0;
  const auto available = available_host_memory();
  if (!available || *available < static_cast<int64_t>(size)) release_kept_blocks();
  *result = map(size);
  if (*result == nullptr) return ENOMEM;
  blocks.hold()->used.emplace(*result, size);
  return 0;
}

// Keeps a block, and takes out those for which there is no room then; empty if it is malloc's.
std::optional<std::vector<Block>> keep(Blocks& all, void* address) {
  const auto found = all.used.find(address);
  if (found == all.used.end()) return std::nullopt;
  all.kept.push_back({address, found->second});
  all.kept_bytes += found->second;
  all.used.erase(found);
  auto oldest = all.kept.begin();
  for (; all.kept_bytes > kMostKept; ++oldest) all.kept_bytes -= oldest->size;
  std::vector<Block> others(all.kept.begin(), oldest);
  all.kept.erase(all.kept.begin(), oldest);
  return others;
}

void release(void* address) {
  if (reinterpret_cast<uintptr_t>(address) % kUnit != 0) return std::free(address);
  const auto others = keep(*blocks.hold(), address);
  if (!others) return std::free(address);
  unmap(*others);
}

// ---- the table of imported functions ----

#if defined(__x86_64__)
constexpr uint32_t kAddressTypes[] = {R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT, R_X86_64_64};
#elif defined(__aarch64__)
constexpr uint32_t kAddressTypes[] = {R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT, R_AARCH64_ABS64};
#else  // nothing is replaced
constexpr uint32_t kAddressTypes[] = {0};
#endif

// An entry of a loaded library's dynamic section: an address, or a number of bytes; 0 if it has
// none.
ElfW(Addr) find_entry(const link_map& library, ElfW(Sxword) tag) {
  const ElfW(Dyn)* entry = library.l_ld;
  while (entry->d_tag != DT_NULL && entry->d_tag != tag) ++entry;
  return entry->d_un.d_ptr;  // of the last one 0
}

// Whether a function's address could be written.
bool write(void** place, void* function) {
  const uintptr_t size = sysconf(_SC_PAGESIZE), page = reinterpret_cast<uintptr_t>(place) & -size;
  // The page may be one that is read-only once the library is loaded; it stays writable.
  if (mprotect(reinterpret_cast<void*>(page), size, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(place, function, __ATOMIC_RELEASE);
  return true;
}

// The places in a library that hold an imported function's address.
std::vector<void**> places_of(const char* name, const link_map& library) {
  const auto* const symbols = reinterpret_cast<const ElfW(Sym)*>(find_entry(library, DT_SYMTAB));
  const auto* const names = reinterpret_cast<const char*>(find_entry(library, DT_STRTAB));
  std::vector<void**> found;
  for (const auto& [start, size] : {std::pair(DT_RELA, DT_RELASZ), {DT_JMPREL, DT_PLTRELSZ}}) {
    const auto* entry = reinterpret_cast<const ElfW(Rela)*>(find_entry(library, start));
    const auto* const end = entry + find_entry(library, size) / sizeof(*entry);
    for (; entry != end; ++entry) {
      const auto symbol = ELF64_R_SYM(entry->r_info);
      if (symbol == 0) continue;  // an address in the library itself
      const uint32_t type = ELF64_R_TYPE(entry->r_info);
      const auto* const types_end = std::end(kAddressTypes);
      if (std::find(std::begin(kAddressTypes), types_end, type) == types_end) continue;
      if (std::strcmp(names + symbols[symbol].st_name, name) != 0) continue;
      found.push_back(reinterpret_cast<void**>(library.l_addr + entry->r_offset));
    }
  }
  return found;
}

// Whether a function is imported, and replaced in all its places.
bool replace(const char* name, void* function, const link_map& library) {
  const auto places = places_of(name, library);
  const auto written = [function](void** place) { return write(place, function); };
  return !places.empty() && std::all_of(places.begin(), places.end(), written);
}

}  // namespace

void keep_blocks_of(const void* address) {
  Dl_info info;
  link_map* library = nullptr;
  if (dladdr1(address, &info, reinterpret_cast<void**>(&library), RTLD_DL_LINKMAP) == 0 ||
      library == nullptr) {
    return;
  }
  // What frees comes first: it takes malloc's blocks, too.
  if (replace("free", reinterpret_cast<void*>(&release), *library)) {
    replace("posix_memalign", reinterpret_cast<void*>(&allocate), *library);
  }
}

int64_t kept_bytes() { return static_cast<int64_t>(blocks.hold()->kept_bytes); }

void release_kept_blocks() {
  std::vector<Block> all;
  {
    const auto held = blocks.hold();
    all.swap(held->kept);
    held->kept_bytes = 0;
  }
  unmap(all);
}

}  // namespace lazyxla::pjrt
