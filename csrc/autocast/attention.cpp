// Under autocast, query, key and value are cast to autocast's dtype, before any check: a bfloat16
// query with a float32 key is what a model under autocast has. Masks and the rest stay as they are.

#include <torch/library.h>

#include "autocast/cast.h"
#include "public_op.h"

namespace qkv {

namespace {

template <c10::DeviceType kDevice>
Tensor attention(const Arguments& a) {
  static const AttentionOp<Tensor> op("qkv::attention");
  return autocast::call(kDevice, a, op);
}

template <c10::DeviceType kDevice>
std::tuple<Tensor, Tensor> attention_with_lse(const Arguments& a) {
  static const AttentionOp<std::tuple<Tensor, Tensor>> op("qkv::attention_with_lse");
  return autocast::call(kDevice, a, op);
}

template <c10::DeviceType kDevice>
Tensor attention_weights(const Arguments& a) {
  static const AttentionWeightsOp op("qkv::attention_weights");
  return autocast::call(kDevice, a, op);
}

template <c10::DeviceType kDevice>
std::string explain(const Arguments& a) {
  static const AttentionOp<std::string> op("qkv::explain");
  return autocast::call(kDevice, a, op);
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
