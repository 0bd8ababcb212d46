#pragma once

#include <cstdint>
#include <functional>
#include <optional>

// What calls take, and what there is. Of Linux; elsewhere nothing is known.

namespace memory {

/// Bytes that can be allocated without swapping; 0 if not known.
int64_t available();

/// Bytes that a call adds to this process at its peak, what it leaves behind included.
std::optional<int64_t> added_by(const std::function<void()>& call);

}  // namespace memory
