// _attention_jvp on CPU: tensors to Params, a parallel loop over tiles.

#include <torch/library.h>

#include "checks.h"
#include "cpu/forward_pass.h"
#include "cpu/heads.h"
#include "cpu/prepared_heads.h"
#include "cpu/readable.h"
#include "internal_op.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

template <class T>
void run_jvp(const Operands& x, const Tangents& tangents, const ForwardResults& forward,
             const Tensor& out_t, const Tensor& lse_t) {
  kernels::JvpParams<T> params{};
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(params.problem, x, batch);
  describe(params.directions, tangents, batch);
  params.out_storage = storage_of(out_t);
  describe(params.out, forward.out, batch);
  if (has_16_bits(forward.out)) describe(params.out_rest, forward.out_rest, batch);
  describe(params.out_t, out_t, batch);
  batch.complete(params.problem);
  params.lse = static_cast<const T*>(forward.lse.const_data_ptr());
  params.lse_rest = static_cast<const T*>(forward.lse_rest.const_data_ptr());
  params.lse_t = static_cast<T*>(lse_t.data_ptr());
  const kernels::TangentKernels<T>& kernels = tangent_kernels_for(params.problem);
  const bool in_16_bits = &kernels != &kernels_for(params.problem);
  const LseOfDerivatives<T> lse_of_scores(in_16_bits, params.problem, params.lse, params.lse_rest);
  lse_of_scores.set_lse(params);
  // Where out may be other than what these weights give, or rounding it moves what depends on it.
  params.takes_means = sizeof(T) == sizeof(float) || lse_of_scores.is_of_its_own();
  const auto prepared =
      prepare_heads(params.problem, kernels.jvp_prepared_bytes(params),
                    [&](int64_t head, void* to) { kernels.prepare_jvp(params, head, to); });
  for_each_unit(
      kernels.jvp_units(params), kernels.jvp_scratch_bytes(params),
      [&](int64_t unit, void* scratch) { kernels.jvp(params, prepared.get(), unit, scratch); });
}

TensorTuple<2> attention_jvp(const Operands& x, const ForwardResults& forward,
                             const Tangents& tangents) {
  check_jvp(kJvpOp, x, forward, tangents);
  check_batch_dimensions(kJvpOp, x);
  const Tensor out_t = empty_output(x), lse_t = empty_logsumexp(x);
  if (lse_t.numel() == 0) return {out_t, lse_t};
  const auto real = lse_t.scalar_type();
  const Tangents along = merging_as(x, tangents);
  const auto run_in = real == at::kDouble ? &run_jvp<double> : &run_jvp<float>;
  for (const Heads& heads : ranges_of_heads(x)) {
    const Tensor to_out_t = heads.of_rows(out_t), to_lse_t = heads.of_scalars(lse_t);
    const Tensor rows_of_out_t = rows_for(to_out_t);
    run_in(readable(heads.of(x), real), readable(heads.of(along), real),
           {in_rows(heads.of_rows(forward.out)), heads.of_scalars(forward.lse),
            in_rows(heads.of_rows(forward.out_rest)), heads.of_scalars(forward.lse_rest)},
           rows_of_out_t, to_lse_t);
    put(rows_of_out_t, to_out_t);
    heads.put_scalars(to_lse_t, lse_t);
  }
  return {out_t, lse_t};
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_jvp", flat<&attention_jvp>); }

}  // namespace

}  // namespace qkv::cpu
