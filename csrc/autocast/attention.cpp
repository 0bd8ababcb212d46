// Under autocast, query, key and value are cast to autocast's dtype, before any check: a bfloat16
// query with a float32 key is what a model under autocast has. Masks and the rest stay as they are.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "public_op.h"

namespace qkv {

namespace {

template <c10::DeviceType kDevice>
Arguments cast(Arguments a) {
  const auto type = at::autocast::get_autocast_dtype(kDevice);
  a.query = at::autocast::cached_cast(type, a.query, kDevice);
  a.key = at::autocast::cached_cast(type, a.key, kDevice);
  if (a.value) a.value = at::autocast::cached_cast(type, *a.value, kDevice);
  return a;
}

constexpr c10::DispatchKey autocast_key(c10::DeviceType device) {
  return device == c10::kCPU ? c10::DispatchKey::AutocastCPU : c10::DispatchKey::AutocastCUDA;
}

template <c10::DeviceType kDevice>
Tensor attention(const Arguments& a) {
  c10::impl::ExcludeDispatchKeyGuard guard(autocast_key(kDevice));
  static const AttentionOp<Tensor> op("qkv::attention");
  return op(cast<kDevice>(a));
}

template <c10::DeviceType kDevice>
std::tuple<Tensor, Tensor> attention_with_lse(const Arguments& a) {
  c10::impl::ExcludeDispatchKeyGuard guard(autocast_key(kDevice));
  static const AttentionOp<std::tuple<Tensor, Tensor>> op("qkv::attention_with_lse");
  return op(cast<kDevice>(a));
}

template <c10::DeviceType kDevice>
Tensor attention_weights(const Arguments& a) {
  c10::impl::ExcludeDispatchKeyGuard guard(autocast_key(kDevice));
  static const AttentionWeightsOp op("qkv::attention_weights");
  return op(cast<kDevice>(a));
}

template <c10::DeviceType kDevice>
std::string explain(const Arguments& a) {
  c10::impl::ExcludeDispatchKeyGuard guard(autocast_key(kDevice));
  static const AttentionOp<std::string> op("qkv::explain");
  return op(cast<kDevice>(a));
}

template <c10::DeviceType kDevice>
void register_all(torch::Library& m) {
  m.impl("attention", &AttentionOp<Tensor>::kernel<&attention<kDevice>>);
  m.impl("attention_with_lse",
         &AttentionOp<std::tuple<Tensor, Tensor>>::kernel<&attention_with_lse<kDevice>>);
  m.impl("attention_weights", &AttentionWeightsOp::kernel<&attention_weights<kDevice>>);
  m.impl("explain", &AttentionOp<std::string>::kernel<&explain<kDevice>>);
}

TORCH_LIBRARY_IMPL(qkv, AutocastCPU, m) { register_all<c10::kCPU>(m); }
TORCH_LIBRARY_IMPL(qkv, AutocastCUDA, m) { register_all<c10::kCUDA>(m); }

}  // namespace

}  // namespace qkv
