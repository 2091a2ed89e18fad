#include "pjrt/host_threads.h"

#include <dirent.h>
#include <sched.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace lazyxla::pjrt {

namespace {

void yield(pid_t thread) {  // 0: the calling one
  if (sched_getscheduler(thread) != SCHED_OTHER) return;
  const sched_param usual{};
  sched_setscheduler(thread, SCHED_BATCH, &usual);  // may be refused, as in some sandboxes
}

}  // namespace

void yield_compute_threads() {
  DIR* threads = opendir("/proc/self/task");
  if (threads == nullptr) {
    return;  // a system without /proc: the threads stay as they are
  }
  while (const dirent* entry = readdir(threads)) {
    std::ifstream file(std::string("/proc/self/task/") + entry->d_name + "/comm");
    std::string name;
    if (!std::getline(file, name) || name != "tf_XLAEigen") {
      continue;
    }
    yield(std::atoi(entry->d_name));
  }
  closedir(threads);
}

void yield_this_thread() { yield(0); }

}  // namespace lazyxla::pjrt
