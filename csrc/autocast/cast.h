#pragma once

#include <ATen/autocast_mode.h>

#include "arguments.h"

namespace qkv::autocast {

constexpr c10::DispatchKey key_of(c10::DeviceType device) {
  return device == c10::kCPU ? c10::DispatchKey::AutocastCPU : c10::DispatchKey::AutocastCUDA;
}

inline bool is_on(c10::DeviceType device) {
  return (device == c10::kCPU || device == c10::kCUDA) && at::autocast::is_autocast_enabled(device);
}

/// op(a) with query, key and value in autocast's dtype, and autocast off for what it calls.
template <class Op>
auto call(c10::DeviceType device, Arguments a, const Op& op) {
  const c10::impl::ExcludeDispatchKeyGuard off(key_of(device));
  const auto cast = [&](const Tensor& x) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), x, device);
  };
  a.query = cast(a.query);
  a.key = cast(a.key);
  if (a.value) a.value = cast(*a.value);
  return op(a);
}

}  // namespace qkv::autocast
