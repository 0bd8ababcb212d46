// _attention_forward on CPU: tensors to Params, one parallel loop over tiles.

#include <torch/library.h>

#include "checks.h"
#include "cpu/kernels.h"
#include "cpu/readable.h"
#include "cpu/units.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

constexpr const char* kOp = "qkv::_attention_forward";

template <class T>
void run(const kernels::ForwardKernels<T>& kernels, const Operands& x,
         const TensorTuple<4>& results) {
  const auto& [out, lse, out_rest, lse_rest] = results;
  kernels::ForwardParams<T> params{};
  BatchDimensions batch(x.query.sizes().slice(0, x.query.dim() - 3));
  describe(params.problem, x, batch);
  params.out_storage = storage_of(out);
  describe(params.out, out, batch);
  if (params.out_storage != kernels::Storage::kSame) describe(params.out_rest, out_rest, batch);
  batch.complete(params.problem);
  params.lse = static_cast<T*>(lse.data_ptr());
  params.lse_rest = static_cast<T*>(lse_rest.data_ptr());

  auto& allocator = *c10::GetCPUAllocator();
  const int64_t heads = params.problem.batch * params.problem.kv_heads;
  const int64_t prepared_bytes = kernels.forward_prepared_bytes(params);
  const auto prepared = allocator.allocate(prepared_bytes);
  params.prepared = prepared.get();
  const int64_t partial_size = kernels.forward_partial_size(params);
  const auto partial = allocator.allocate(partial_size * sizeof(T));
  params.partial = static_cast<T*>(partial.get());

  if (prepared_bytes > 0) {
    for_each_unit(heads, 0, [&](int64_t head, void*) { kernels.prepare_forward(params, head); });
  }
  const int64_t in_turn = kernels.forward_tiles_in_turn(params, at::get_num_threads());
  for_each_unit(
      kernels.forward_units(params, in_turn), kernels.forward_scratch_bytes(params, in_turn),
      [&](int64_t unit, void* scratch) { kernels.forward(params, in_turn, unit, scratch); });
  if (partial_size > 0) {
    for_each_unit(heads, 0, [&](int64_t head, void*) { kernels.merge_forward(params, head); });
  }
}

TensorTuple<4> attention_forward(const Operands& x) {
  check_operands(kOp, x);
  check_batch_dimensions(kOp, x);
  const auto results = empty_forward_results(x);
  const Tensor& lse = std::get<1>(results);
  if (lse.numel() == 0) return results;
  const Operands stored = readable(x, lse.scalar_type());
  const auto& table = kernel_table();
  if (lse.scalar_type() == at::kDouble) {
    run<double>(kernels_for<double>(), stored, results);
  } else if (const auto* in_16_bits =
                 half_kernels_for(x, table.bfloat16_forward, table.float16_forward)) {
    run<float>(*in_16_bits, stored, results);
  } else {
    run<float>(kernels_for<float>(), stored, results);
  }
  return results;
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_forward", flat<&attention_forward>); }

}  // namespace

}  // namespace qkv::cpu
