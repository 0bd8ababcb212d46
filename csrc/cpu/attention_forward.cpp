// _attention_forward on CPU: tensors to Params, one parallel loop over tiles.

#include <torch/library.h>

#include <limits>

#include "cpu/kernels.h"
#include "cpu/problem.h"
#include "cpu/units.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

template <class T>
void run(const Operands& x, const Tensor& out, const Tensor& lse) {
  kernels::ForwardParams<T> params{};
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(params.problem, x, batch);
  describe(params.out, out, batch);
  batch.complete(params.problem);
  params.lse = static_cast<T*>(lse.data_ptr());

  const auto& kernels = kernels_for<T>();
  for_each_unit(kernels.forward_units(params), kernels.forward_scratch_bytes(params),
                [&](int64_t unit, void* scratch) { kernels.forward(params, unit, scratch); });
}

TensorTuple<2> attention_forward(const Operands& operands) {
  auto [out, lse] = empty_forward_results(operands);
  if (lse.numel() == 0) return {out, lse};
  const auto real = lse.scalar_type();
  const Operands x = readable(operands, real);
  const Tensor real_out = writable(out, real);
  if (real == at::kDouble) {
    run<double>(x, real_out, lse);
  } else {
    run<float>(x, real_out, lse);
  }
  if (!real_out.is_same(out)) out.copy_(real_out);
  return {out, lse};
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_forward", flat<&attention_forward>); }

}  // namespace

}  // namespace qkv::cpu
