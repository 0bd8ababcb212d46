// _attention_jvp on CUDA: tensors to Params, and one launch, after one for the lse
// where the forward's is of other scores.

#include <torch/library.h>

#include "checks.h"
#include "cuda/lse_of_tiles.h"
#include "cuda/readable.h"
#include "internal_op.h"
#include "kernels/cuda/simt/tasks.h"
#include "layout.h"

namespace qkv::cuda {

namespace {

template <class T>
void run_jvp(const Operands& x, const Tangents& tangents, const ForwardResults& forward,
             const Tensor& out_t, const Tensor& lse_t) {
  kernels::simt::JvpTask<T> task{};
  kernels::JvpParams<T>& params = task.jvp;
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(params.problem, x, batch);
  describe(params.directions, tangents, batch);
  describe(params.out, forward.out, batch);
  if (has_16_bits(forward.out)) describe(task.out_rest, forward.out_rest, batch);
  describe(params.out_t, out_t, batch);
  batch.complete(params.problem);
  params.lse_t = static_cast<T*>(lse_t.data_ptr());

  const Stream stream(x.query);
  const LseOfTiles<T> of_tiles(kJvpOp, params.problem, forward, stream);
  of_tiles.set_lse(params);
  check(kJvpOp, kernels::simt::attention_jvp(task, stream.get()));
}

TensorTuple<2> attention_jvp(const Operands& x, const ForwardResults& forward,
                             const Tangents& tangents) {
  check_jvp(kJvpOp, x, forward, tangents);
  check_batch_dimensions(kJvpOp, x);
  const Tensor out_t = empty_output(x), lse_t = empty_logsumexp(x);
  if (lse_t.numel() == 0) return {out_t, lse_t};
  const auto real = lse_t.scalar_type();
  const auto run_in = real == at::kDouble ? &run_jvp<double> : &run_jvp<float>;
  run_in(readable(x, real), readable(merging_as(x, tangents), real), readable(forward), out_t,
         lse_t);
  return {out_t, lse_t};
}

TORCH_LIBRARY_IMPL(qkv, QKV_CUDA_KEY, m) { m.impl("_attention_jvp", flat<&attention_jvp>); }

}  // namespace

}  // namespace qkv::cuda
