#include <torch/library.h>

#include "vmap/batched.h"

namespace qkv::vmap {

namespace {

TensorTuple<4> attention_forward(const Operands& x, bool needs_rest) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const Level level(x);
  if (!level.any()) return attention_forward_op()(x, needs_rest);
  auto results = as_array(attention_forward_op()(level.unwrap(x), needs_rest));
  for (Tensor& result : results) result = level.wrap(result);
  return std::tuple_cat(results);
}

TORCH_LIBRARY_IMPL(qkv, FuncTorchBatched, m) {
  m.impl("_attention_forward", flat<&attention_forward>);
}

}  // namespace

}  // namespace qkv::vmap
