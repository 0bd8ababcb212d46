#include "checks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "dtype_name.h"
#include "sizes.h"

namespace qkv {

namespace {

using c10::SymInt;
using Shape = std::vector<SymInt>;

constexpr std::array<const char*, Operands::kTensors> kNames = {
    "query", "key", "value", "attn_mask", "alibi_slopes", "sinks", "key_mask", "dropout_seed"};

void check_dense(const char* op, const char* name, const Tensor& x) {
  TORCH_CHECK_TYPE(x.defined(), op, ": ", name, " must be a tensor, but is undefined");
  TORCH_CHECK_TYPE(!x.is_nested(), op, ": ", name, " must be a dense tensor, but is nested");
  TORCH_CHECK_TYPE(x.layout() == at::kStrided, op, ": ", name,
                   " must be a dense tensor, but has layout ", x.layout());
  TORCH_CHECK_TYPE(!x.is_quantized(), op, ": ", name, " must not be quantized, but is ",
                   dtype_name(x.scalar_type()));
}

void check_device(const char* op, const char* name, const Tensor& x, const Tensor& query) {
  TORCH_CHECK_VALUE(x.device() == query.device(), op,
                    ": all tensors must be on one device, but query is on ", query.device(),
                    " and ", name, " on ", x.device());
}

bool is_supported_float(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

bool may_go_with(const Tensor& x, const Tensor& query) {
  return x.scalar_type() == query.scalar_type() || x.scalar_type() == at::kFloat;
}

std::string types_that_go_with(const Tensor& query) {
  const std::string type = dtype_name(query.scalar_type());
  return type + " as query is" + (type == "float32" ? "" : " or float32");
}

void check_broadcasts(const char* op, const char* name, const Tensor& x, const char* letters,
                      const Shape& full) {
  bool fits = x.dim() <= static_cast<int64_t>(full.size());
  for (int64_t d = 1; fits && d <= x.dim(); ++d) {
    fits = is_one(x.sym_size(-d)) || are_same(x.sym_size(-d), full[full.size() - d]);
  }
  TORCH_CHECK_VALUE(fits, op, ": ", name, " must broadcast to ", letters, " = ",
                    c10::SymIntArrayRef(full), ", but has shape ", x.sym_sizes());
}

Shape joined(const Shape& batch, std::initializer_list<SymInt> rest) {
  Shape shape = batch;
  shape.insert(shape.end(), rest.begin(), rest.end());
  return shape;
}

void check_head_numbers(const char* op, const char* name, const Tensor& x, const Tensor& query,
                        const ScoreShape& scores) {
  check_dense(op, name, x);
  TORCH_CHECK_TYPE(may_go_with(x, query), op, ": ", name, " must be ", types_that_go_with(query),
                   ", but is ", dtype_name(x.scalar_type()));
  check_device(op, name, x, query);
  TORCH_CHECK_VALUE(x.dim() >= 1 && are_same(x.sym_size(-1), scores.heads), op, ": ", name,
                    " must have one number for each of the Hq=", scores.heads,
                    " query heads, but has shape ", x.sym_sizes());
  check_broadcasts(op, name, x, "(batch.., Hq)", joined(scores.batch, {scores.heads}));
}

/// One of an internal operator's tensors: dense, and exactly so.
void check_exactly(const char* op, const char* name, const Tensor& x, const Tensor& query,
                   const Shape& shape, at::ScalarType type) {
  check_dense(op, name, x);
  check_device(op, name, x, query);
  TORCH_CHECK_TYPE(x.scalar_type() == type, op, ": ", name, " must be ", dtype_name(type),
                   ", but is ", dtype_name(x.scalar_type()));
  TORCH_CHECK_VALUE(x.sym_sizes() == c10::SymIntArrayRef(shape), op, ": ", name,
                    " must have shape ", c10::SymIntArrayRef(shape), ", but has ", x.sym_sizes());
}

Shape batch_of(const Tensor& x) {
  const auto sizes = x.sym_sizes();
  return sizes.slice(0, sizes.size() - 3).vec();
}

Shape output_shape(const Operands& x, SymInt width) {
  return joined(batch_of(x.query), {x.query.sym_size(-3), x.query.sym_size(-2), std::move(width)});
}

ScoreShape score_shape(const Operands& x) {
  return {batch_of(x.query), x.query.sym_size(-3), x.query.sym_size(-2), x.key.sym_size(-2)};
}

Shape row_shape(const Operands& x) {
  return joined(batch_of(x.query), {x.query.sym_size(-3), x.query.sym_size(-2)});
}

}  // namespace

void check_rows_of_numbers(const char* op, const char* name, const Tensor& x) {
  check_dense(op, name, x);
  TORCH_CHECK_TYPE(is_supported_float(x.scalar_type()), op, ": ", name,
                   " must be float64, float32, bfloat16 or float16, but is ",
                   dtype_name(x.scalar_type()));
}

void check_like_query(const char* op, const char* name, const Tensor& x, const Tensor& query) {
  check_rows_of_numbers(op, name, x);
  TORCH_CHECK_TYPE(x.scalar_type() == query.scalar_type(), op,
                   ": query, key and value must have one dtype, but query is ",
                   dtype_name(query.scalar_type()), " and ", name, " is ",
                   dtype_name(x.scalar_type()));
  check_device(op, name, x, query);
}

void check_masks(const char* op, const Tensor& query, const ScoreShape& scores,
                 const OptionalTensor& attn_mask, const OptionalTensor& key_mask,
                 const OptionalTensor& alibi_slopes, const OptionalTensor& sinks) {
  if (attn_mask) {
    check_dense(op, "attn_mask", *attn_mask);
    TORCH_CHECK_TYPE(attn_mask->scalar_type() == at::kBool || may_go_with(*attn_mask, query), op,
                     ": attn_mask must be bool (True = may attend), or ", types_that_go_with(query),
                     ", but is ", dtype_name(attn_mask->scalar_type()));
    check_device(op, "attn_mask", *attn_mask, query);
    check_broadcasts(op, "attn_mask", *attn_mask, "(batch.., Hq, M, N)",
                     joined(scores.batch, {scores.heads, scores.queries, scores.keys}));
  }
  if (key_mask) {
    check_dense(op, "key_mask", *key_mask);
    TORCH_CHECK_TYPE(key_mask->scalar_type() == at::kBool, op,
                     ": key_mask must be bool (True = may be attended to), but is ",
                     dtype_name(key_mask->scalar_type()));
    check_device(op, "key_mask", *key_mask, query);
    check_broadcasts(op, "key_mask", *key_mask, "(batch.., N)",
                     joined(scores.batch, {scores.keys}));
  }
  if (alibi_slopes) check_head_numbers(op, "alibi_slopes", *alibi_slopes, query, scores);
  if (sinks) check_head_numbers(op, "sinks", *sinks, query, scores);
}

void check_scalars(const char* op, const Tensor& query, std::optional<double> scale, double softcap,
                   double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p <= 1.0, op,
                    ": dropout_p must be between 0 and 1, but is ", dropout_p);
  const auto real = accumulate_type(query);
  const double largest =
      real == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  TORCH_CHECK_VALUE(!scale || std::abs(*scale) <= largest, op, ": scale must be finite in ",
                    dtype_name(real), ", but is ", scale.value_or(0.0));
  TORCH_CHECK_VALUE(softcap >= 0.0 && std::isfinite(softcap), op,
                    ": softcap must be positive and finite, or 0 for none, but is ", softcap);
}

void check_operands(const char* op, const Operands& x) {
  check_like_query(op, "query", x.query, x.query);
  check_like_query(op, "key", x.key, x.query);
  check_like_query(op, "value", x.value, x.query);
  const int64_t rank = x.query.dim();
  TORCH_CHECK_VALUE(rank >= 3 && x.key.dim() == rank && x.value.dim() == rank, op,
                    ": query, key and value must be (batch.., heads, rows, width), but have ranks ",
                    rank, ", ", x.key.dim(), " and ", x.value.dim());
  const ScoreShape scores = score_shape(x);
  const SymInt kv_heads = x.key.sym_size(-3);
  const bool heads_fit =
      is_known_to_be(scores.heads, kv_heads) || is_multiple(scores.heads, kv_heads);
  const auto all_but_width = [](const Tensor& t) { return t.sym_sizes().slice(0, t.dim() - 1); };
  TORCH_CHECK_VALUE(batch_of(x.key) == scores.batch &&
                        all_but_width(x.value) == all_but_width(x.key) && heads_fit &&
                        x.key.sym_size(-1) == x.query.sym_size(-1),
                    op,
                    ": query, key and value must be (batch.., Hq, M, D), (batch.., Hkv, N, D) and "
                    "(batch.., Hkv, N, Dv) where Hkv divides Hq, but have shapes ",
                    x.query.sym_sizes(), ", ", x.key.sym_sizes(), " and ", x.value.sym_sizes());
  check_masks(op, x.query, scores, x.attn_mask, x.key_mask, x.alibi_slopes, x.sinks);
  TORCH_CHECK_VALUE(!x.key_mask || x.key_mask->dim() > 0, op, ": key_mask must have a dimension");
  check_scalars(op, x.query, x.scale, x.softcap, x.dropout_p);
  TORCH_CHECK_VALUE(x.dropout_seed || x.dropout_p == 0.0, op, ": dropout needs dropout_seed");
  if (x.dropout_seed) {
    check_exactly(op, "dropout_seed", *x.dropout_seed, x.query, scores.batch, at::kLong);
  }
  TORCH_CHECK_VALUE(x.band.size() == 3, op,
                    ": band must be three numbers, (left, right, query_offset), but has ",
                    x.band.size());
}

void check_weights(const char* op, const Operands& x) {
  check_operands(op, x);
  TORCH_CHECK_VALUE(x.dropout_p == 0.0, op, ": dropout_p must be 0, but is ", x.dropout_p);
  TORCH_CHECK_VALUE(is_known_to_be(x.value.sym_size(-1), 0), op,
                    ": value must have no columns, but has shape ", x.value.sym_sizes());
}

namespace {

void check_tangents(const char* op, const Operands& x, const Tangents& tangents) {
  const auto primals = x.tensors();
  for (size_t i = 0; i < tangents.size(); ++i) {
    if (!tangents[i]) continue;
    TORCH_CHECK_VALUE(primals[i], op, ": there is no ", kNames[i], " to have a derivative");
    const auto type = tangents[i]->scalar_type();
    TORCH_CHECK_TYPE(type == primals[i]->scalar_type() && type != at::kBool, op, ": ", kNames[i],
                     "'s derivative must be ", dtype_name(primals[i]->scalar_type()),
                     " as it is, but is ", dtype_name(type));
    if (i < 3)
      check_exactly(op, kNames[i], *tangents[i], x.query, primals[i]->sym_sizes().vec(), type);
  }
  // Where an operand is broadcast, its tangent need not be: of one mask, vmap may have many
  // tangents.
  check_masks(op, x.query, score_shape(x), tangents[3], {}, tangents[4], tangents[5]);
}

void check_needs(const char* op, const Operands& x, const Needs& needs) {
  const auto tensors = x.tensors();
  for (size_t i = 0; i < needs.size(); ++i) {
    TORCH_CHECK_VALUE(!needs[i] || (tensors[i] && tensors[i]->is_floating_point()), op,
                      ": there is no ", kNames[i], " of floating-point numbers to have a gradient");
  }
}

void check_grad_outputs(const char* op, const Operands& x, const Tensor& grad_out,
                        const OptionalTensor& grad_lse) {
  check_exactly(op, "grad_output", grad_out, x.query, output_shape(x, x.value.sym_size(-1)),
                x.query.scalar_type());
  if (!grad_lse) return;
  check_exactly(op, "grad_logsumexp", *grad_lse, x.query, row_shape(x), accumulate_type(x.query));
}

void check_forward_results(const char* op, const Operands& x, const ForwardResults& forward) {
  const auto type = x.query.scalar_type(), real = accumulate_type(x.query);
  const SymInt width = x.value.sym_size(-1);
  const bool has_rest = type != real;
  check_exactly(op, "output", forward.out, x.query, output_shape(x, width), type);
  check_exactly(op, "output_rest", forward.out_rest, x.query, output_shape(x, has_rest ? width : 0),
                type);
  check_exactly(op, "logsumexp", forward.lse, x.query, row_shape(x), real);
  check_exactly(op, "logsumexp_rest", forward.lse_rest, x.query, row_shape(x), real);
}

}  // namespace

void check_backward(const char* op, const Operands& x, const Tensor& grad_out,
                    const OptionalTensor& grad_lse, const ForwardResults& forward,
                    const Needs& needs) {
  check_operands(op, x);
  check_needs(op, x, needs);
  check_grad_outputs(op, x, grad_out, grad_lse);
  check_forward_results(op, x, forward);
}

void check_weights_backward(const char* op, const Operands& x, const Tensor& grad_weights,
                            const Tensor& lse, const Tensor& lse_rest, const Needs& needs) {
  check_weights(op, x);
  check_needs(op, x, needs);
  const auto type = x.query.scalar_type(), real = accumulate_type(x.query);
  check_exactly(op, "grad_weights", grad_weights, x.query, output_shape(x, x.key.sym_size(-2)),
                type);
  check_exactly(op, "logsumexp", lse, x.query, row_shape(x), real);
  check_exactly(op, "logsumexp_rest", lse_rest, x.query, row_shape(x), real);
}

void check_jvp(const char* op, const Operands& x, const ForwardResults& forward,
               const Tangents& tangents) {
  check_operands(op, x);
  check_forward_results(op, x, forward);
  check_tangents(op, x, tangents);
}

void check_backward_backward(const char* op, const Operands& x, const Tensor& grad_out,
                             const OptionalTensor& grad_lse, const ForwardResults& forward,
                             const Tangents& cotangents, const NeedsOfSecond& needs) {
  check_operands(op, x);
  check_grad_outputs(op, x, grad_out, grad_lse);
  check_forward_results(op, x, forward);
  check_tangents(op, x, cotangents);
  check_needs(op, x, of_operands(needs));
}

}  // namespace qkv
