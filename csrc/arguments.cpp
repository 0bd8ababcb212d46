#include "arguments.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "dtype_name.h"

namespace qkv {

namespace {

using c10::SymInt;
using Shape = std::vector<SymInt>;

Shape shape_of(const Tensor& x) { return x.sym_sizes().vec(); }

std::string text(const Shape& shape) {
  std::ostringstream out;
  out << c10::SymIntArrayRef(shape);
  return out.str();
}

bool is_supported_float(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

void check_ordinary_tensor(const char* op, const char* name, const Tensor& x) {
  TORCH_CHECK_TYPE(x.defined(), op, ": ", name, " must be a tensor, but is undefined");
  TORCH_CHECK_TYPE(!x.is_nested(), op, ": ", name, " must be a dense tensor, but is nested");
  TORCH_CHECK_TYPE(x.layout() == at::kStrided, op, ": ", name,
                   " must be a dense tensor, but has layout ", x.layout());
  TORCH_CHECK_TYPE(!x.is_quantized(), op, ": ", name, " must not be quantized, but is ",
                   dtype_name(x.scalar_type()));
}

void check_query_key_value(const char* op, const Arguments& a) {
  const auto check = [&](const char* name, const Tensor& x) {
    check_ordinary_tensor(op, name, x);
    TORCH_CHECK_TYPE(is_supported_float(x.scalar_type()), op, ": ", name,
                     " must be float64, float32, bfloat16 or float16, but is ",
                     dtype_name(x.scalar_type()));
    TORCH_CHECK_TYPE(x.scalar_type() == a.query.scalar_type(), op,
                     ": query, key and value must have one dtype, but query is ",
                     dtype_name(a.query.scalar_type()), " and ", name, " is ",
                     dtype_name(x.scalar_type()));
    TORCH_CHECK_VALUE(x.device() == a.query.device(), op,
                      ": all tensors must be on one device, but query is on ", a.query.device(),
                      " and ", name, " on ", x.device());
    TORCH_CHECK_VALUE(x.dim() >= 2, op, ": ", name,
                      " must have at least the dimensions (rows, width), but has shape ",
                      x.sym_sizes());
  };
  check("query", a.query);
  check("key", a.key);
  TORCH_CHECK_VALUE(a.query.sym_size(-1) == a.key.sym_size(-1), op,
                    ": query and key must have the same head dim, but query has D=",
                    a.query.sym_size(-1), " and key D=", a.key.sym_size(-1));
  if (!a.value) return;
  check("value", *a.value);
  TORCH_CHECK_VALUE(a.key.sym_size(-2) == a.value->sym_size(-2), op,
                    ": key and value must have the same number of keys, but key has N=",
                    a.key.sym_size(-2), " and value N=", a.value->sym_size(-2));
}

void check_scalars(const char* op, const Arguments& a) {
  TORCH_CHECK_VALUE(a.dropout_p >= 0.0 && a.dropout_p <= 1.0, op,
                    ": dropout_p must be between 0 and 1, but is ", a.dropout_p);
  const double largest_scale = a.query.scalar_type() == at::kDouble
                                   ? std::numeric_limits<double>::max()
                                   : std::numeric_limits<float>::max();
  TORCH_CHECK_VALUE(!a.scale || std::abs(*a.scale) <= largest_scale, op,
                    ": scale must be finite, but is ", a.scale.value_or(0.0));
  TORCH_CHECK_VALUE(a.softcap >= 0.0 && std::isfinite(a.softcap), op,
                    ": softcap must be positive, or 0 for none, but is ", a.softcap);
  if (!a.window) return;
  TORCH_CHECK_VALUE(a.window->size() == 2, op,
                    ": window must be two numbers, (left, right), but has ", a.window->size());
  // Of a traced number that nobody knows yet, this becomes a check at run time.
  const auto is_bound = [](const SymInt& x) {
    return x.sym_ge(-1).expect_true(__FILE__, __LINE__);
  };
  TORCH_CHECK_VALUE(is_bound((*a.window)[0]) && is_bound((*a.window)[1]), op,
                    ": window must be (left, right) with both >= 0, or -1 for unbounded, but is (",
                    (*a.window)[0], ", ", (*a.window)[1], ")");
}

/// The common shape of two that broadcast.
Shape broadcast(const char* op, const char* what, const Shape& a, const Shape& b) {
  const Shape& longer = a.size() >= b.size() ? a : b;
  const Shape& shorter = a.size() >= b.size() ? b : a;
  Shape result = longer;
  const size_t shift = longer.size() - shorter.size();
  for (size_t d = 0; d < shorter.size(); ++d) {
    if (shorter[d] == 1) continue;
    TORCH_CHECK_VALUE(result[shift + d] == 1 || result[shift + d] == shorter[d], op, ": ", what,
                      " must broadcast, but are ", text(a), " and ", text(b));
    result[shift + d] = shorter[d];
  }
  return result;
}

/// A tensor that comes with query, key and value must broadcast to a shape known by now.
void check_extra(const char* op, const char* name, const Tensor& x, const Tensor& query,
                 const char* letters, const Shape& full) {
  TORCH_CHECK_VALUE(x.device() == query.device(), op,
                    ": all tensors must be on one device, but query is on ", query.device(),
                    " and ", name, " on ", x.device());
  bool fits = x.dim() <= static_cast<int64_t>(full.size());
  for (int64_t d = 1; fits && d <= x.dim(); ++d) {
    fits = x.sym_size(-d) == 1 || x.sym_size(-d) == full[full.size() - d];
  }
  TORCH_CHECK_VALUE(fits, op, ": ", name, " must broadcast to ", letters, " = ", text(full),
                    ", but has shape ", x.sym_sizes());
}

void check_float_extra(const char* op, const char* name, const Tensor& x, const Tensor& query,
                       const Shape& batch, const SymInt& heads) {
  check_ordinary_tensor(op, name, x);
  TORCH_CHECK_TYPE(x.scalar_type() == query.scalar_type() || x.scalar_type() == at::kFloat, op,
                   ": ", name, " must have query's dtype, ", dtype_name(query.scalar_type()),
                   ", or float32, but is ", dtype_name(x.scalar_type()));
  Shape full = batch;
  full.push_back(heads);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) == heads, op, ": ", name,
                    " must have one number for each of the Hq=", heads,
                    " query heads, but has shape ", x.sym_sizes());
  check_extra(op, name, x, query, "(batch.., Hq)", full);
}

void check_masks(const char* op, const Arguments& a, const Shape& batch, const SymInt& heads) {
  const Tensor& query = a.query;
  const SymInt keys = a.key.sym_size(-2);
  if (a.attn_mask) {
    const Tensor& mask = *a.attn_mask;
    check_ordinary_tensor(op, "attn_mask", mask);
    const auto type = mask.scalar_type();
    TORCH_CHECK_TYPE(type == at::kBool || type == query.scalar_type() || type == at::kFloat, op,
                     ": attn_mask must be bool (True = may attend), or float with query's dtype, ",
                     dtype_name(query.scalar_type()), ", or float32, but is ", dtype_name(type));
    Shape full = batch;
    full.insert(full.end(), {heads, query.sym_size(-2), keys});
    check_extra(op, "attn_mask", mask, query, "(batch.., Hq, M, N)", full);
  }
  if (a.key_mask) {
    check_ordinary_tensor(op, "key_mask", *a.key_mask);
    TORCH_CHECK_TYPE(a.key_mask->scalar_type() == at::kBool, op,
                     ": key_mask must be bool (True = may be attended to), but is ",
                     dtype_name(a.key_mask->scalar_type()));
    Shape full = batch;
    full.push_back(keys);
    check_extra(op, "key_mask", *a.key_mask, query, "(batch.., N)", full);
  }
  if (a.alibi_slopes) check_float_extra(op, "alibi_slopes", *a.alibi_slopes, query, batch, heads);
  if (a.sinks) check_float_extra(op, "sinks", *a.sinks, query, batch, heads);
}

SymInt heads_of(const Tensor& x) { return x.dim() >= 3 ? x.sym_size(-3) : SymInt(1); }

Shape batch_of(const Tensor& x) {
  const Shape shape = shape_of(x);
  return x.dim() > 3 ? Shape(shape.begin(), shape.end() - 3) : Shape();
}

/// How many key/value heads there are, and how many query heads.
std::pair<SymInt, SymInt> checked_heads(const char* op, const Arguments& a) {
  const SymInt key_heads = heads_of(a.key);
  const SymInt value_heads = a.value ? heads_of(*a.value) : key_heads;
  TORCH_CHECK_VALUE(key_heads == value_heads || key_heads == 1 || value_heads == 1, op,
                    ": key and value must have the same number of heads (or one), but key has ",
                    key_heads, " and value ", value_heads);
  const SymInt kv_heads = key_heads == 1 ? value_heads : key_heads;
  const SymInt query_heads = heads_of(a.query);
  if (query_heads == kv_heads || kv_heads == 1) return {kv_heads, query_heads};
  if (query_heads == 1) return {kv_heads, kv_heads};
  TORCH_CHECK_VALUE(a.enable_gqa, op, ": query has Hq=", query_heads,
                    " heads and key and value Hkv=", kv_heads,
                    "; enable_gqa=True allows Hkv to be a divisor of Hq");
  TORCH_CHECK_VALUE(kv_heads != 0 && query_heads % kv_heads == 0, op,
                    ": with enable_gqa, Hkv must divide Hq, but Hq=", query_heads,
                    " and Hkv=", kv_heads);
  return {kv_heads, query_heads};
}

/// (.., rows, width) as (batch.., heads, rows, width), a view.
Tensor expanded(const Tensor& x, const Shape& batch, const SymInt& heads) {
  Shape full = batch;
  full.insert(full.end(), {heads, x.sym_size(-2), x.sym_size(-1)});
  return full == shape_of(x) ? x : x.expand_symint(full);
}

OptionalTensor given(const OptionalTensor& x) { return x && x->defined() ? x : OptionalTensor(); }

std::vector<SymInt> band_of(const Arguments& a) {
  SymInt left = a.window ? (*a.window)[0] : SymInt(-1);
  SymInt right = a.window ? (*a.window)[1] : SymInt(-1);
  if (a.is_causal) right = 0;  // a window to the right of the diagonal has nothing left to add
  SymInt offset = a.query_offset.value_or(0);
  constexpr int64_t kFar = int64_t(1) << 60;  // from every key, yet sums with it do not overflow
  if (const auto number = offset.maybe_as_int()) offset = std::clamp(*number, -kFar, kFar);
  return {std::move(left), std::move(right), std::move(offset)};
}

std::string why_unfused(const Call& call) {
  const auto device = call.operands.query.device();
  if (device.is_cpu() || device.is_meta()) return "";
  return c10::str("this build has no kernels for device type ", device.type());
}

}  // namespace

Call checked_call(const char* op, const Arguments& given_arguments) {
  Arguments a = given_arguments;
  for (OptionalTensor* x : {&a.attn_mask, &a.alibi_slopes, &a.sinks, &a.key_mask}) *x = given(*x);
  check_query_key_value(op, a);
  check_scalars(op, a);
  const auto [kv_heads, query_heads] = checked_heads(op, a);
  Shape batch =
      broadcast(op, "the batch dimensions of query and key", batch_of(a.query), batch_of(a.key));
  if (a.value) {
    batch =
        broadcast(op, "the batch dimensions of query, key and value", batch, batch_of(*a.value));
  }
  check_masks(op, a, batch, query_heads);

  Call call;
  call.operands.query = expanded(a.query, batch, query_heads);
  call.operands.key = expanded(a.key, batch, kv_heads);
  if (a.value) call.operands.value = expanded(*a.value, batch, kv_heads);
  call.operands.attn_mask = a.attn_mask;
  call.operands.alibi_slopes = a.alibi_slopes;
  call.operands.sinks = a.sinks;
  call.operands.key_mask =
      a.key_mask && a.key_mask->dim() == 0 ? a.key_mask->unsqueeze(0) : a.key_mask;
  call.operands.scale = a.scale;
  call.operands.softcap = a.softcap;
  call.operands.dropout_p = a.dropout_p;
  call.operands.band = band_of(a);
  call.unbatched_head = a.query.dim() == 2 && a.key.dim() == 2 && (!a.value || a.value->dim() == 2);
  call.unfused_reason = why_unfused(call);
  return call;
}

}  // namespace qkv
