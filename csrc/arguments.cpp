#include "arguments.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

#include "checks.h"
#include "sizes.h"

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

void check_query_key_value(const char* op, const Arguments& a) {
  const auto check = [&](const char* name, const Tensor& x) {
    check_like_query(op, name, x, a.query);
    TORCH_CHECK_VALUE(x.dim() >= 2, op, ": ", name,
                      " must have at least the dimensions (rows, width), but has shape ",
                      x.sym_sizes());
  };
  check("query", a.query);
  check("key", a.key);
  TORCH_CHECK_VALUE(are_same(a.query.sym_size(-1), a.key.sym_size(-1)), op,
                    ": query and key must have the same head dim, but query has D=",
                    a.query.sym_size(-1), " and key D=", a.key.sym_size(-1));
  if (!a.value) return;
  check("value", *a.value);
  TORCH_CHECK_VALUE(are_same(a.key.sym_size(-2), a.value->sym_size(-2)), op,
                    ": key and value must have the same number of keys, but key has N=",
                    a.key.sym_size(-2), " and value N=", a.value->sym_size(-2));
}

void check_window(const char* op, const Arguments& a) {
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
    if (is_one(shorter[d])) continue;
    TORCH_CHECK_VALUE(is_one(result[shift + d]) || are_same(result[shift + d], shorter[d]), op,
                      ": ", what, " must broadcast, but are ", text(a), " and ", text(b));
    result[shift + d] = shorter[d];
  }
  return result;
}

SymInt heads_of(const Tensor& x) { return x.dim() >= 3 ? x.sym_size(-3) : SymInt(1); }

Shape batch_dims_of(const Tensor& x) {
  const Shape shape = shape_of(x);
  return x.dim() > 3 ? Shape(shape.begin(), shape.end() - 3) : Shape();
}

/// How many key/value heads there are, and how many query heads.
std::pair<SymInt, SymInt> checked_heads(const char* op, const Arguments& a) {
  const SymInt key_heads = heads_of(a.key);
  const SymInt value_heads = a.value ? heads_of(*a.value) : key_heads;
  const bool one_key_head = is_one(key_heads);
  TORCH_CHECK_VALUE(one_key_head || is_one(value_heads) || are_same(key_heads, value_heads), op,
                    ": key and value must have the same number of heads (or one), but key has ",
                    key_heads, " and value ", value_heads);
  const SymInt kv_heads = one_key_head ? value_heads : key_heads;
  const SymInt query_heads = heads_of(a.query);
  if (is_one(kv_heads) || is_known_to_be(query_heads, kv_heads)) return {kv_heads, query_heads};
  if (is_one(query_heads)) return {kv_heads, kv_heads};
  if (!a.enable_gqa) {
    TORCH_CHECK_VALUE(are_same(query_heads, kv_heads), op, ": query has Hq=", query_heads,
                      " heads and key and value Hkv=", kv_heads,
                      "; enable_gqa=True allows Hkv to be a divisor of Hq");
    return {kv_heads, query_heads};
  }
  TORCH_CHECK_VALUE(is_multiple(query_heads, kv_heads), op,
                    ": with enable_gqa, Hkv must divide Hq, but Hq=", query_heads,
                    " and Hkv=", kv_heads);
  return {kv_heads, query_heads};
}

/// (.., rows, width) as (batch.., heads, rows, width), a view.
Tensor expanded(Tensor x, const Shape& batch, const SymInt& heads) {
  Shape full = batch;
  full.insert(full.end(), {heads, x.sym_size(-2), x.sym_size(-1)});
  // Autograd sums over dimensions that expand() adds, also over one of size 1.
  while (x.dim() < static_cast<int64_t>(full.size())) x = x.unsqueeze(0);
  return are_known_to_be_same(full, x.sym_sizes()) ? x : x.expand_symint(full);
}

OptionalTensor given(const OptionalTensor& x) { return x && x->defined() ? x : OptionalTensor(); }

std::vector<SymInt> band_of(const Arguments& a) {
  SymInt left = a.window ? (*a.window)[0] : SymInt(-1);
  SymInt right = a.window ? (*a.window)[1] : SymInt(-1);
  if (a.is_causal) right = 0;  // a window to the right of the diagonal has nothing left to add
  SymInt offset = a.query_offset.value_or(0);
  const auto l = left.maybe_as_int(), r = right.maybe_as_int(), o = offset.maybe_as_int();
  if (l && r && o) {
    const auto band = clamped_band(*l, *r, *o);
    return {band.begin(), band.end()};
  }
  if (o) offset = std::clamp(*o, -kFar, kFar);
  return {std::move(left), std::move(right), std::move(offset)};
}

std::string why_unfused(const Call& call) {
  const auto device = call.operands.query.device();
  if (device.is_cpu() || device.is_meta()) return "";
#if defined(QKV_HAS_CUDA)
  if (device.is_cuda()) return "";
#endif
  return c10::str("this build has no kernels for device type ", device.type());
}

}  // namespace

Arguments as_arguments(const Tensor& query, const Tensor& key, const OptionalTensor& value,
                       const AttentionOptions& options) {
  Arguments a;
  a.query = query;
  a.key = key;
  a.value = value;
  a.attn_mask = options.attn_mask();
  a.dropout_p = options.dropout_p();
  a.is_causal = options.is_causal();
  a.scale = options.scale();
  a.enable_gqa = options.enable_gqa();
  if (options.window()) a.window = {options.window()->first, options.window()->second};
  if (options.query_offset()) a.query_offset = *options.query_offset();
  a.softcap = options.softcap();
  a.alibi_slopes = options.alibi_slopes();
  a.sinks = options.sinks();
  a.key_mask = options.key_mask();
  return a;
}

Call checked_call(const char* op, const Arguments& given_arguments) {
  Arguments a = given_arguments;
  for (OptionalTensor* x : {&a.attn_mask, &a.alibi_slopes, &a.sinks, &a.key_mask}) *x = given(*x);
  check_query_key_value(op, a);
  check_scalars(op, a.query, a.scale, a.softcap, a.dropout_p);
  check_window(op, a);
  const auto [kv_heads, query_heads] = checked_heads(op, a);
  Shape batch = broadcast(op, "the batch dimensions of query and key", batch_dims_of(a.query),
                          batch_dims_of(a.key));
  if (a.value) {
    batch = broadcast(op, "the batch dimensions of query, key and value", batch,
                      batch_dims_of(*a.value));
  }
  const ScoreShape scores{batch, query_heads, a.query.sym_size(-2), a.key.sym_size(-2)};
  check_masks(op, a.query, scores, a.attn_mask, a.key_mask, a.alibi_slopes, a.sinks);

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
