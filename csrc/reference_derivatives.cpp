// Forward mode and second order by formulas in ATen operations (derived in docs/derivations.md).
// They hold the M x N matrices of the reference and are differentiable in turn.
//
//     P = softmax of the kept scores, O = P V, dP = dO Vᵀ, dS = P ∘ (dP - delta)

#include <ATen/ATen.h>
#include <torch/library.h>

#include "environment.h"
#include "reference.h"

namespace qkv {

namespace {

/// The softmax and the tensors around it, with one head for each query head, in the numbers that
/// sums are taken in.
struct Recomputed {
  const Operands& operands;
  at::ScalarType real;
  Tensor query, key, value;
  reference::Softmax softmax;

  explicit Recomputed(const Operands& x)
      : operands(x), real(reference::accumulate_type(x.query)), query(x.query.to(real)) {
    key = for_query_heads(x.key);
    value = for_query_heads(x.value);
    Call call;
    call.operands = x;
    softmax = reference::softmax(call);
    // Of the weights' full shape: product_of_kept needs its transpose as well.
    softmax.keep = softmax.keep.expand_symint(softmax.weights.sym_sizes());
  }

  Tensor for_query_heads(const Tensor& x) const {
    return reference::for_query_heads(x, operands).to(real);
  }

  /// a bᵀ at the kept pairs, 0 elsewhere.
  Tensor pairs(const Tensor& a, const Tensor& b) const {
    return at::matmul(a, b.transpose(-2, -1)).where(softmax.keep, 0.0);
  }

  /// Sums over keys j of pairs(i, j) · x(j), and over queries i of pairs(i, j) · x(i).
  Tensor over_keys(const Tensor& pairs, const Tensor& x) const {
    return reference::product_of_kept(pairs, softmax.keep, x);
  }
  Tensor over_queries(const Tensor& pairs, const Tensor& x) const {
    return reference::product_of_kept(pairs.transpose(-2, -1), softmax.keep.transpose(-2, -1), x);
  }

  /// A gradient for query heads, summed over the heads that share a key/value head.
  Tensor for_kv_heads(const Tensor& x) const {
    const c10::SymInt kv_heads = operands.key.sym_size(-3);
    if (x.sym_size(-3) == kv_heads) return x;
    return x.unflatten_symint(-3, {kv_heads, x.sym_size(-3) / kv_heads}).sum(-3);
  }

  Tensor mask_pairs(const Tensor& mask) const { return mask.to(real).where(softmax.keep, 0.0); }
};

void add(Tensor& sum, const Tensor& x) { sum = sum.defined() ? sum + x : x; }

std::tuple<Tensor, Tensor> attention_jvp(const Operands& x, const OptionalTensor& query_t,
                                         const OptionalTensor& key_t, const OptionalTensor& value_t,
                                         const OptionalTensor& attn_mask_t) {
  report_fallback("qkv::attention", "forward-mode derivatives have no fused kernel");
  const Recomputed r(x);
  const Tensor& weights = r.softmax.weights;
  Tensor scores_t = at::zeros_like(weights);
  if (query_t) scores_t = scores_t + r.pairs(query_t->to(r.real) * x.scale, r.key);
  if (key_t) scores_t = scores_t + r.pairs(r.query * x.scale, r.for_query_heads(*key_t));
  if (attn_mask_t) scores_t = scores_t + r.mask_pairs(*attn_mask_t);
  const Tensor weighted = weights * scores_t;
  const Tensor lse_t = weighted.sum(-1);
  Tensor out_t = r.over_keys(weighted - weights * lse_t.unsqueeze(-1), r.value);
  if (value_t) out_t = out_t + r.over_keys(weights, r.for_query_heads(*value_t));
  return {out_t.to(x.query.scalar_type()), lse_t};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward_backward(
    const Operands& x, const Tensor& grad_out, const OptionalTensor& grad_lse,
    const OptionalTensor& grad_grad_query, const OptionalTensor& grad_grad_key,
    const OptionalTensor& grad_grad_value, const OptionalTensor& grad_grad_attn_mask,
    std::array<bool, 6> needs) {
  report_fallback("qkv::attention", "second derivatives have no fused kernel");
  const Recomputed r(x);
  const Tensor& p = r.softmax.weights;
  const auto row_sum = [](const Tensor& pairs) { return pairs.sum(-1, true); };

  const Tensor d_out = grad_out.to(r.real);
  const Tensor dp = r.pairs(d_out, r.value);
  const Tensor out_delta = row_sum(p * dp);  // <dO, O>
  const Tensor delta = grad_lse ? out_delta - grad_lse->unsqueeze(-1) : out_delta;
  const Tensor ds = p * (dp - delta);

  // A: the cotangent of dS. B: the part of P's cotangent that comes from dV = Pᵀ dO.
  Tensor a = at::zeros_like(p);
  Tensor ggq, ggk, ggv;
  if (grad_grad_query) {
    ggq = grad_grad_query->to(r.real);
    a = a + r.pairs(ggq * x.scale, r.key);
  }
  if (grad_grad_key) {
    ggk = r.for_query_heads(*grad_grad_key);
    a = a + r.pairs(r.query * x.scale, ggk);
  }
  if (grad_grad_attn_mask) a = a + r.mask_pairs(*grad_grad_attn_mask);
  Tensor b = at::zeros_like(p);
  if (grad_grad_value) {
    ggv = r.for_query_heads(*grad_grad_value);
    b = r.pairs(d_out, ggv);
  }

  const Tensor a_sum = row_sum(p * a);
  const Tensor cot_dp = p * (a - a_sum);
  const Tensor cot_p = a * (dp - delta) - a_sum * dp + b;
  const Tensor cot_s = p * (cot_p - row_sum(p * cot_p));

  Tensor grads[6];
  if (needs[0]) {
    grads[0] = r.over_keys(cot_dp, r.value);
    if (ggv.defined()) add(grads[0], r.over_keys(p, ggv));
    grads[0] = grads[0].to(grad_out.scalar_type());
  }
  if (needs[1]) grads[1] = a_sum.squeeze(-1);
  if (needs[2]) {
    grads[2] = r.over_keys(cot_s, r.key);
    if (ggk.defined()) add(grads[2], r.over_keys(ds, ggk));
    grads[2] = (grads[2] * x.scale).to(x.query.scalar_type());
  }
  if (needs[3]) {
    grads[3] = r.over_queries(cot_s, r.query);
    if (ggq.defined()) add(grads[3], r.over_queries(ds, ggq));
    grads[3] = (r.for_kv_heads(grads[3]) * x.scale).to(x.key.scalar_type());
  }
  if (needs[4]) {
    grads[4] = r.for_kv_heads(r.over_queries(cot_dp, d_out)).to(x.value.scalar_type());
  }
  if (needs[5]) {
    grads[5] = cot_s.sum_to_size_symint(x.attn_mask->sym_sizes()).to(x.attn_mask->scalar_type());
  }
  for (Tensor& grad : grads) {
    if (!grad.defined()) grad = at::empty({0}, x.query.options());
  }
  return {grads[0], grads[1], grads[2], grads[3], grads[4], grads[5]};
}

TORCH_LIBRARY_IMPL(qkv, CompositeImplicitAutograd, m) {
  m.impl("_attention_jvp", flat<&attention_jvp>);
  m.impl("_attention_backward_backward", flat<&attention_backward_backward>);
}

TORCH_LIBRARY_IMPL(qkv, FuncTorchBatchedDecomposition, m) {
  m.impl("_attention_jvp", flat<&attention_jvp>);
  m.impl("_attention_backward_backward", flat<&attention_backward_backward>);
}

}  // namespace

}  // namespace qkv
