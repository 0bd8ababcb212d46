#pragma once

#include <cstdlib>
#include <optional>
#include <string>

/// While it lives QKV_STRICT is not set: for tests of what has no fused kernel.
class AllowUnfused {
 public:
  AllowUnfused() {
    if (const char* value = std::getenv(kName)) before_ = value;
    unsetenv(kName);
  }
  ~AllowUnfused() {
    if (before_) setenv(kName, before_->c_str(), /*overwrite=*/1);
  }
  AllowUnfused(const AllowUnfused&) = delete;
  AllowUnfused& operator=(const AllowUnfused&) = delete;

 private:
  static constexpr const char* kName = "QKV_STRICT";
  std::optional<std::string> before_;
};
