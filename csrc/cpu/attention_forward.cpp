// _attention_forward on CPU: tensors to Params, one parallel loop over tiles.

#include <torch/library.h>

#include <type_traits>

#include "checks.h"
#include "cpu/kernels.h"
#include "cpu/readable.h"
#include "cpu/units.h"
#include "layout.h"

namespace qkv::cpu {

namespace {

/// What one call runs, and what it reads.
template <class T>
struct Choice {
  const kernels::ForwardKernels<T>& kernels;
  Operands operands;
};

template <class T>
Choice<T> choose(const Operands& x, at::ScalarType real) {
  const auto sizes = sizes_of<T>(x);
  if constexpr (std::is_same_v<T, float>) {
    const auto* in_bfloat16 = kernel_table().bfloat16;
    if (x.query.scalar_type() == at::kBFloat16 && in_bfloat16 != nullptr &&
        in_bfloat16->forward_reads_16_bits(sizes)) {
      Operands stored = readable(x, real, Reads16Bits::kAll);
      // The key is read in pairs: all its rows must begin like the first.
      if (stored.key.stride(-2) % 2 != 0) stored.key = stored.key.contiguous();
      return {*in_bfloat16, stored};
    }
  }
  const auto& kernels = kernels_for<T>();
  const auto reads =
      kernels.forward_reads_16_bits(sizes) ? Reads16Bits::kKeyValue : Reads16Bits::kNothing;
  return {kernels, readable(x, real, reads)};
}

template <class T>
void run(const Operands& operands, const TensorTuple<4>& results) {
  const auto& [out, lse, out_rest, lse_rest] = results;
  const Choice<T> choice = choose<T>(operands, lse.scalar_type());
  const kernels::ForwardKernels<T>& kernels = choice.kernels;
  const Operands& x = choice.operands;
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
  check_operands("qkv::_attention_forward", x);
  check_batch_dimensions(x);
  const auto results = empty_forward_results(x);
  const Tensor& lse = std::get<1>(results);
  if (lse.numel() == 0) return results;
  if (lse.scalar_type() == at::kDouble) {
    run<double>(x, results);
  } else {
    run<float>(x, results);
  }
  return results;
}

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("_attention_forward", flat<&attention_forward>); }

}  // namespace

}  // namespace qkv::cpu
