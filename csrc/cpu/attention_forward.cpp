// _attention_forward on CPU: tensors to Params, and parallel loops (forward_pass.h).

#include <torch/library.h>

#include "checks.h"
#include "cpu/forward_pass.h"
#include "cpu/readable.h"
#include "internal_op.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

template <class T>
void run_forward(const Operands& x, const TensorTuple<4>& results) {
  const auto& [out, lse, out_rest, lse_rest] = results;
  kernels::ForwardParams<T> params{};
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(params.problem, x, batch);
  params.out_storage = storage_of(out);
  describe(params.out, out, batch);
  if (out_rest.numel() > 0) describe(params.out_rest, out_rest, batch);
  batch.complete(params.problem);
  params.lse = static_cast<T*>(lse.data_ptr());
  params.lse_rest = static_cast<T*>(lse_rest.data_ptr());

  forward_pass(forward_kernels_for(params.problem), params);
}

TensorTuple<4> attention_forward(const Operands& x, bool needs_rest) {
  check_operands(kForwardOp, x);
  check_batch_dimensions(kForwardOp, x);
  const auto results = empty_forward_results(x, needs_rest);
  const Tensor& lse = std::get<1>(results);
  if (lse.numel() == 0) return results;
  const Operands stored = readable(x, lse.scalar_type());
  const auto& [out, _, out_rest, lse_rest] = results;
  const TensorTuple<4> written = {rows_for(out), lse, rows_for(out_rest), lse_rest};
  if (lse.scalar_type() == at::kDouble) {
    run_forward<double>(stored, written);
  } else {
    run_forward<float>(stored, written);
  }
  put(std::get<0>(written), out);
  put(std::get<2>(written), out_rest);
  return results;
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_forward", flat<&attention_forward>); }

}  // namespace

}  // namespace qkv::cpu
