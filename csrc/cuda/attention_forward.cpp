// _attention_forward on CUDA: tensors to Params, and one launch (two if the keys are split).

#include <torch/library.h>

#include "checks.h"
#include "cuda/readable.h"
#include "cuda/stream.h"
#include "internal_op.h"
#include "kernels/cuda/simt/tasks.h"
#include "kernels/cuda/sm80/tasks.h"
#include "layout.h"

namespace qkv::cuda {

namespace {

int run_kernels(const kernels::simt::ForwardTask<double>& task, void* stream) {
  return kernels::simt::attention_forward(task, stream);
}
int run_kernels(const kernels::simt::ForwardTask<float>& task, void* stream) {
  return kernels::sm80::takes_forward(task.forward.problem)
             ? kernels::sm80::attention_forward(task, stream)
             : kernels::simt::attention_forward(task, stream);
}

template <class T>
void run_forward(const Operands& x, const TensorTuple<4>& results) {
  const auto& [out, lse, out_rest, lse_rest] = results;
  kernels::simt::ForwardTask<T> task{};
  kernels::ForwardParams<T>& params = task.forward;
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(params.problem, x, batch);
  describe(params.out, out, batch);
  if (out_rest.numel() > 0) describe(params.out_rest, out_rest, batch);
  batch.complete(params.problem);
  params.lse = static_cast<T*>(lse.data_ptr());
  params.lse_rest = static_cast<T*>(lse_rest.data_ptr());
  task.splits = kernels::simt::forward_splits(params.problem);
  const Tensor partial = at::empty({kernels::simt::forward_partial_size(task)}, lse.options());
  params.partial = static_cast<T*>(partial.data_ptr());

  const Stream stream(x.query);
  check(kForwardOp, run_kernels(task, stream.get()));
}

TensorTuple<4> attention_forward(const Operands& x, bool needs_rest) {
  check_operands(kForwardOp, x);
  check_batch_dimensions(kForwardOp, x);
  const auto results = empty_forward_results(x, needs_rest);
  const auto real = std::get<1>(results).scalar_type();
  if (std::get<1>(results).numel() == 0) return results;
  const auto run_in = real == at::kDouble ? &run_forward<double> : &run_forward<float>;
  run_in(readable(x, real), results);
  return results;
}

TORCH_LIBRARY_IMPL(qkv, QKV_CUDA_KEY, m) { m.impl("_attention_forward", flat<&attention_forward>); }

}  // namespace

}  // namespace qkv::cuda
