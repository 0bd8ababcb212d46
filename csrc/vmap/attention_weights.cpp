#include <torch/library.h>

#include "vmap/batched.h"

namespace qkv::vmap {

namespace {

TensorTuple<3> attention_weights(const Operands& x) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const Level level(x);
  if (!level.any()) return attention_weights_op()(x);
  auto results = as_array(attention_weights_op()(level.unwrap(x)));
  for (Tensor& result : results) result = level.wrap(result);
  return std::tuple_cat(results);
}

TORCH_LIBRARY_IMPL(qkv, FuncTorchBatched, m) {
  m.impl("_attention_weights", flat<&attention_weights>);
}

}  // namespace

}  // namespace qkv::vmap
