// _attention_weights on CPU: tensors to Params, and parallel loops (weights_pass.h).

#include <torch/library.h>

#include "checks.h"
#include "cpu/readable.h"
#include "cpu/weights_pass.h"
#include "internal_op.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

template <class T>
void run_weights(const Operands& x, const TensorTuple<3>& results) {
  const auto& [weights, lse, lse_rest] = results;
  kernels::WeightsParams<T> params{};
  kernels::ForwardParams<T>& forward = params.forward;
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(forward.problem, x, batch);
  forward.out_storage = storage_of(weights);
  describe(forward.out, weights, batch);
  batch.complete(forward.problem);
  forward.lse = static_cast<T*>(lse.data_ptr());
  forward.lse_rest = static_cast<T*>(lse_rest.data_ptr());

  weights_pass(params);
}

TensorTuple<3> attention_weights(const Operands& x) {
  check_weights(kWeightsOp, x);
  check_batch_dimensions(kWeightsOp, x);
  const auto results = empty_weights(x);
  const Tensor& lse = std::get<1>(results);
  if (lse.numel() == 0) return results;
  const Operands stored = readable(x, lse.scalar_type());
  if (lse.scalar_type() == at::kDouble) {
    run_weights<double>(stored, results);
  } else {
    run_weights<float>(stored, results);
  }
  return results;
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_weights", flat<&attention_weights>); }

}  // namespace

}  // namespace qkv::cpu
