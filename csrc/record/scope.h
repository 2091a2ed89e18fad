// Scopes: when the operators that a thread records run.
//
// The process has a mode. A `with` block gives its thread another one for a while, and may be a
// compiled region, whose operators are one program:
//
//     eager_mode(True)              the process's mode
//     with eager_mode(False):       a scope with a mode
//         with compile(name="f"):   a scope with a mode (lazy) and a region
//
// A scope belongs to the thread that entered it, and to autograd's threads while they work for that
// thread: PyTorch hands its thread-local state on to them, and ours is part of it.
#pragma once

#include <c10/core/SafePyObject.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ir/node.h"

namespace lazyxla::record {

enum class Mode : uint8_t {
  kLazy,   // at a sync, or when a value is read
  kEager,  // each operator at its call
  kFused,  // in small batches, at once (batches.h)
};

// Why a pending graph is run.
enum class Cause : uint8_t {
  kSync,       // the user said so
  kRead,       // a value is read
  kLimit,      // too much is pending
  kMode,       // the mode asks for it, or changes
  kRegionEnd,  // the compiled region is complete
  kApart,      // runs apart from the program: it breaks no region
};

// A user's compile(): shared by all calls of one compiled function.
struct Region {
  std::string name;
  bool full_graph = false;              // breaking it into two programs is an error
  std::optional<int64_t> max_programs;  // compiling more is an error
  CompileOptions options;               // that its programs are compiled with
  std::atomic<int64_t> programs{0};     // compiled so far
};

// Derives from what PyTorch hands on to autograd's threads; it holds no Python object.
struct Scope : c10::SafePyObject {
  Scope(Mode mode, std::shared_ptr<Region> region, std::shared_ptr<Scope> outer, bool nested,
        bool outermost)
      : SafePyObject(nullptr, nullptr),
        mode(mode),
        region(std::move(region)),
        outer(std::move(outer)),
        nested(nested),
        outermost(outermost) {}
  std::atomic<Mode> mode;
  const std::shared_ptr<Region> region;  // null: only a mode
  const std::shared_ptr<Scope> outer;
  const bool nested;           // in a scope of the same thread; else `outer`, if any, was handed on
  const bool outermost;        // of a region: it is in no other, and its end is that of the program
  std::shared_ptr<void> held;  // dropped with it
};

// The calling thread's mode.
Mode current_mode();

// A mode set by a thread: of its innermost scope, or outside of all of the process.
struct ModeChange {
  const Mode mode;
  std::optional<Mode> before;  // once it is made
};

// Sets a mode. The change is made when the thread records or asks for something next, or when
// settle() says so: if a block is entered with it before, no other thread ever sees it.
std::shared_ptr<ModeChange> set_mode(Mode mode);
void settle(const ModeChange& change);

// Takes a change back.
void confine(ModeChange& change);

// Whether the innermost scope is a region: what is recorded now is part of its program.
bool in_region();

// Enters a scope, and leaves the one that the calling thread entered last: its innermost is again
// what it was before.
void enter_scope(Mode mode, std::shared_ptr<Region> region, bool outermost);
void leave_scope();

// Throws unless the calling thread entered a scope that it has not left.
void check_scope_is_own();

// The options of the outermost region that the thread is in, whose program it is; else null.
const CompileOptions* region_options();

// Throws if the thread is in a full_graph region, which `what` (a clause) would break.
void check_unbroken(const std::string& what);
void check_unbroken(Cause cause);

// The calling thread's innermost scope, or null.
std::shared_ptr<Scope> current_scope();

// A function that counts each program that is compiled for the calling thread's work, on any
// thread, in the regions that the thread is in now: Origin::admit of program/program.h. It returns
// the reason with the innermost region's name, or throws TooManyPrograms if one of the regions has
// its number already. Null if the thread is in no scope.
std::function<std::string(const std::string& reason)> program_counter();

}  // namespace lazyxla::record
