#include "environment.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace qkv {

namespace {

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace

bool strict() { return is_set("QKV_STRICT"); }

bool verbose() {
  static const bool set = is_set("QKV_VERBOSE");
  return set;
}

const char* requested_cpu_isa() {
  static const char* const name = is_set("QKV_CPU_ISA") ? std::getenv("QKV_CPU_ISA") : nullptr;
  return name;
}

void report_fallback(const char* op, const std::string& reason) {
  TORCH_CHECK(!strict(), op, ": QKV_STRICT is set and this would run unfused: ", reason);
  static std::mutex mutex;
  static std::set<std::string> reported;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!reported.insert(reason).second) return;
  }
  TORCH_WARN(op, ": running unfused, in memory for all M x N scores, because ", reason,
             ". (Said once for each reason; QKV_STRICT=1 makes it an error.)");
}

}  // namespace qkv
