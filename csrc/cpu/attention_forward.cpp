// _attention_forward on CPU: tensors to Params, one parallel loop over tiles.

#include <torch/library.h>

#include "checks.h"
#include "cpu/kernels.h"
#include "cpu/problem.h"
#include "cpu/units.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

template <class T>
void run(const Operands& operands, const Tensor& out, const Tensor& lse, const Tensor& lse_rest) {
  const auto& kernels = kernels_for<T>();
  kernels::ForwardParams<T> params{};
  const auto reads = kernels.forward_reads_16_bits(sizes_of<T>(operands)) ? KeyValue::kAsStored
                                                                          : KeyValue::kConverted;
  const Operands x = readable(operands, lse.scalar_type(), reads);
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(params.problem, x, batch);
  describe(params.out, out, batch);
  batch.complete(params.problem);
  params.lse = static_cast<T*>(lse.data_ptr());
  params.lse_rest = static_cast<T*>(lse_rest.data_ptr());

  const int64_t partial_size = kernels.forward_partial_size(params);
  const auto partial = c10::GetCPUAllocator()->allocate(partial_size * sizeof(T));
  params.partial = static_cast<T*>(partial.get());
  for_each_unit(kernels.forward_units(params), kernels.forward_scratch_bytes(params),
                [&](int64_t unit, void* scratch) { kernels.forward(params, unit, scratch); });
  if (partial_size > 0) {
    for_each_unit(params.problem.batch * params.problem.kv_heads, 0,
                  [&](int64_t head, void*) { kernels.merge_forward(params, head); });
  }
}

TensorTuple<4> attention_forward(const Operands& x) {
  check_operands("qkv::_attention_forward", x);
  check_batch_dimensions(x);
  const auto [out, lse, out_rest, lse_rest] = empty_forward_results(x);
  if (lse.numel() == 0) return {out, lse, out_rest, lse_rest};
  const auto real = lse.scalar_type();
  const Tensor real_out = writable(out, real);
  if (real == at::kDouble) {
    run<double>(x, real_out, lse, lse_rest);
  } else {
    run<float>(x, real_out, lse, lse_rest);
  }
  if (!real_out.is_same(out)) {
    out.copy_(real_out);
    out_rest.copy_(real_out.sub_(out));
  }
  return {out, lse, out_rest, lse_rest};
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_forward", flat<&attention_forward>); }

}  // namespace

}  // namespace qkv::cpu
