// The CPU's plugin, whose path the environment variable PLUGIN tells: what the plugins here wrap.
#pragma once

#include <dlfcn.h>
#include <pjrt_c_api.h>

#include <cstdlib>

inline const PJRT_Api* cpu() {
  static const PJRT_Api* api = [] {
    void* library = dlopen(std::getenv("PLUGIN"), RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"))();
  }();
  return api;
}
