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
void run(const Operands& x, Tensor& out, Tensor& lse) {
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

std::tuple<Tensor, Tensor> attention_forward(const Operands& operands) {
  const Operands x = with_unit_columns(operands);
  auto [out, lse] = empty_forward_results(operands);
  if (lse.numel() == 0) return {out, lse};
  if (x.query.scalar_type() == at::kDouble) {
    run<double>(x, out, lse);
  } else {
    run<float>(x, out, lse);
  }
  return {out, lse};
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_forward", flat<&attention_forward>); }

}  // namespace

}  // namespace qkv::cpu
