// The public operators, and their C++ front door: check, choose a path, call it.

#include <qkv/attention.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <iostream>
#include <limits>

#include "autocast/cast.h"
#include "environment.h"
#include "explain.h"
#include "internal_op.h"
#include "problem.h"
#include "public_op.h"
#include "reference.h"

namespace qkv {

namespace {

/// One number for each batch element, drawn on the device from the default generator. The dropped
/// weights depend on it alone. (A number drawn in C++ would be frozen into a compiled graph.)
Tensor draw_seed(const Operands& x) {
  const auto sizes = x.query.sym_sizes();
  return at::randint_symint(std::numeric_limits<int64_t>::max(), sizes.slice(0, sizes.size() - 3),
                            x.query.options().dtype(at::kLong));
}

/// The one place that decides between the fused kernel and the reference.
std::tuple<Tensor, Tensor> run(const char* op, const Call& call) {
  if (verbose()) std::cerr << description(op, call);
  Operands x = call.operands;
  const bool fused = call.unfused_reason.empty();
  if (fused) {
    check_batch_dimensions(op, x);
  } else {
    report_fallback(op, call.unfused_reason);
  }
  if (x.dropout_p > 0.0) x.dropout_seed = draw_seed(x);
  if (!fused) return reference::attention(x);
  const auto results = attention_forward_op()(x, /*needs_rest=*/false);  // autograd asks for it
  return {std::get<0>(results), std::get<1>(results)};
}

Tensor attention_composite(const Arguments& arguments) {
  const Call call = checked_call("qkv::attention", arguments);
  return call.restore_rank(std::get<0>(run("qkv::attention", call)));
}

std::tuple<Tensor, Tensor> attention_with_lse_composite(const Arguments& arguments) {
  const Call call = checked_call("qkv::attention_with_lse", arguments);
  const auto [out, lse] = run("qkv::attention_with_lse", call);
  return {call.restore_rank(out), call.restore_rank(lse)};
}

/// A kernel on a CPU. Elsewhere the reference: the result is M x N numbers itself, so that takes no
/// more memory than it must.
Tensor weights_of(const char* op, Operands x) {
  if (!x.query.is_cpu()) {
    return reference::softmax(x).weights.to(x.query.scalar_type()).contiguous();
  }
  auto no_columns = x.key.sym_sizes().vec();
  no_columns.back() = 0;
  x.value = at::empty_symint(no_columns, x.query.options());
  check_batch_dimensions(op, x);
  return std::get<0>(attention_weights_op()(x));
}

Tensor attention_weights_composite(const Arguments& arguments) {
  const char* op = "qkv::attention_weights";
  const Call call = checked_call(op, arguments);
  return call.restore_rank(weights_of(op, call.operands));
}

std::string explain_composite(const Arguments& arguments) {
  const Call call = checked_call("qkv::explain", arguments);
  if (call.unfused_reason.empty()) check_batch_dimensions("qkv::explain", call.operands);
  return description("qkv::explain", call);
}

/// vmap's keys come before autocast's. After the kernel of autocast's key, that is off.
template <auto kComposite>
auto after_autocast(const Arguments& a) {
  const bool is_on = a.query.defined() && autocast::is_on(a.query.device().type());
  return is_on ? autocast::call(a.query.device().type(), a, kComposite) : kComposite(a);
}

// FuncTorchBatchedDecomposition: without it, vmap would loop over the batch. FuncTorchVmapMode: so
// that vmap's rules of randomness hold for the seed even if no argument is mapped.
#define QKV_REGISTER_COMPOSITE(key)                                                            \
  TORCH_LIBRARY_IMPL(qkv, key, m) {                                                            \
    m.impl("attention", &AttentionOp<Tensor>::kernel<&after_autocast<&attention_composite>>);  \
    m.impl("attention_with_lse", &AttentionOp<std::tuple<Tensor, Tensor>>::kernel<             \
                                     &after_autocast<&attention_with_lse_composite>>);         \
    m.impl("attention_weights",                                                                \
           &AttentionWeightsOp::kernel<&after_autocast<&attention_weights_composite>>);        \
    m.impl("explain", &AttentionOp<std::string>::kernel<&after_autocast<&explain_composite>>); \
  }

QKV_REGISTER_COMPOSITE(CompositeImplicitAutograd)
QKV_REGISTER_COMPOSITE(FuncTorchBatchedDecomposition)
QKV_REGISTER_COMPOSITE(FuncTorchVmapMode)

}  // namespace

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const AttentionOptions& options) {
  static const AttentionOp<Tensor> op("qkv::attention");
  return op(as_arguments(query, key, value, options));
}

std::tuple<Tensor, Tensor> attention_with_lse(const Tensor& query, const Tensor& key,
                                              const Tensor& value,
                                              const AttentionOptions& options) {
  static const AttentionOp<std::tuple<Tensor, Tensor>> op("qkv::attention_with_lse");
  return op(as_arguments(query, key, value, options));
}

Tensor attention_weights(const Tensor& query, const Tensor& key, const AttentionOptions& options) {
  TORCH_CHECK_VALUE(options.dropout_p() == 0.0,
                    "qkv::attention_weights: the weights are those before dropout, so dropout_p "
                    "must be 0, but is ",
                    options.dropout_p());
  static const AttentionWeightsOp op("qkv::attention_weights");
  return op(as_arguments(query, key, std::nullopt, options));
}

std::string explain(const Tensor& query, const Tensor& key, const Tensor& value,
                    const AttentionOptions& options) {
  static const AttentionOp<std::string> op("qkv::explain");
  return op(as_arguments(query, key, value, options));
}

}  // namespace qkv
