#include "memory.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <fstream>
#include <string>

namespace memory {

namespace {

/// A line like "VmRSS:   1234 kB" of a file of /proc, in bytes; 0 if there is none.
int64_t field(const char* path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    int64_t kilobytes = 0;
    if (word == name + ':' && file >> kilobytes) return 1024 * kilobytes;
  }
  return 0;
}

}  // namespace

int64_t available() { return field("/proc/meminfo", "MemAvailable"); }

std::optional<int64_t> added_by(const std::function<void()>& call) {
#if defined(__GLIBC__)
  malloc_trim(0);  // what calls before have left to this one would not be seen
#endif
  const char* status = "/proc/self/status";
  std::ofstream reset("/proc/self/clear_refs");
  reset << 5 << std::flush;  // the peak, VmHWM, starts anew
  if (!reset) return std::nullopt;
  const int64_t before = field(status, "VmRSS");
  call();
  return field(status, "VmHWM") - before;
}

}  // namespace memory
