// Forward mode and second order by formulas in ATen operations (derived in docs/derivations.md).
// They hold the M x N matrices of the reference and are differentiable in turn: what third
// derivatives are made of, and what the kernels are tested against.
// Autocast may be on while a derivative is taken; in them it is off, as it would round the scores.
//
//     U = scale · Q Kᵀ             S = softcap(U) + mask - slope · distance
//     P = softmax of the kept S    W = weight of the sink     R = what dropout multiplies P with
//     O = (R ∘ P) V                dP = R ∘ (dO Vᵀ)           dS = P ∘ (dP - delta)
//     dU = softcap'(U) ∘ dS

#include <ATen/ATen.h>

#include "reference.h"

namespace qkv::reference {

namespace {

/// The softmax and the tensors around it, with one head for each query head, in the numbers that
/// sums are taken in. All pairs (batch.., Hq, M, N) are 0 where they are not kept.
struct Recomputed {
  const Operands& x;
  at::ScalarType real;
  at::Scalar scale;
  Tensor query, key, value;
  reference::Softmax softmax;
  Tensor cap_slope;      // softcap'(U), undefined without a softcap
  Tensor cap_curvature;  // softcap''(U)
  Tensor factors;        // R, undefined without dropout

  explicit Recomputed(const Operands& operands)
      : x(operands), real(accumulate_type(x.query)), scale(scale_of(x)), query(x.query.to(real)) {
    key = for_query_heads(x.key);
    value = for_query_heads(x.value);
    softmax = reference::softmax(x);
    // Of the weights' full shape: product_of_kept needs its transpose as well.
    softmax.keep = softmax.keep.expand_symint(softmax.weights.sym_sizes());
    if (x.softcap != 0.0) {
      const Tensor t = reference::tanh_of_softcap(x).where(softmax.keep, 0.0);
      cap_slope = 1.0 - t * t;
      cap_curvature = t * cap_slope * -2.0 / reference::softcap_of(x);
    }
    factors = reference::dropout_factors(x);
  }

  Tensor for_query_heads(const Tensor& t) const {
    return reference::for_query_heads(t, x).to(real);
  }

  /// a bᵀ at the kept pairs.
  Tensor pairs(const Tensor& a, const Tensor& b) const {
    return reference::product_of_rows_and_columns(a, b.transpose(-2, -1)).where(softmax.keep, 0.0);
  }

  Tensor mask_pairs(const Tensor& mask) const { return mask.to(real).where(softmax.keep, 0.0); }

  /// slope_h · |p - j|
  Tensor slope_pairs(const Tensor& slopes) const {
    return (slopes.to(real).unsqueeze(-1).unsqueeze(-1) * reference::distances(x))
        .where(softmax.keep, 0.0);
  }

  Tensor capped(const Tensor& pairs) const {
    return cap_slope.defined() ? pairs * cap_slope : pairs;
  }
  Tensor dropped(const Tensor& pairs) const { return factors.defined() ? pairs * factors : pairs; }

  /// Sums over keys j of pairs(i, j) · t(j), and over queries i of pairs(i, j) · t(i).
  Tensor over_keys(const Tensor& pairs, const Tensor& t) const {
    return reference::product_of_kept(pairs, softmax.keep, t);
  }
  Tensor over_queries(const Tensor& pairs, const Tensor& t) const {
    return reference::product_of_kept(pairs.transpose(-2, -1), softmax.keep.transpose(-2, -1), t);
  }

  /// A gradient for query heads, summed over the heads that share a key/value head.
  Tensor for_kv_heads(const Tensor& t) const {
    const c10::SymInt kv_heads = x.key.sym_size(-3);
    if (t.sym_size(-3) == kv_heads) return t;
    return t.unflatten_symint(-3, {kv_heads, t.sym_size(-3) / kv_heads}).sum(-3);
  }
};

/// Tensors of zeros are left undefined until something is added.
void add(Tensor& sum, const Tensor& x) { sum = sum.defined() ? sum + x : x; }

Tensor row_sum(const Tensor& pairs) { return pairs.sum(-1, true); }

}  // namespace

TensorTuple<2> attention_jvp(const Operands& x, const Tangents& tangents) {
  const c10::impl::ExcludeDispatchKeyGuard autocast_off(c10::autocast_dispatch_keyset);
  const auto& [query_t, key_t, value_t, attn_mask_t, alibi_slopes_t, sinks_t] = tangents;
  const Recomputed r(x);
  const Tensor& p = r.softmax.weights;
  Tensor scores_t = at::zeros_like(p);
  if (query_t) scores_t = scores_t + r.capped(r.pairs(query_t->to(r.real) * r.scale, r.key));
  if (key_t) {
    scores_t = scores_t + r.capped(r.pairs(r.query * r.scale, r.for_query_heads(*key_t)));
  }
  if (attn_mask_t) scores_t = scores_t + r.mask_pairs(*attn_mask_t);
  if (alibi_slopes_t) scores_t = scores_t - r.slope_pairs(*alibi_slopes_t);
  const Tensor weighted = p * scores_t;
  Tensor lse_t = row_sum(weighted);
  if (sinks_t)
    lse_t = lse_t + r.softmax.sink_weights * sinks_t->to(r.real).unsqueeze(-1).unsqueeze(-1);
  Tensor out_t = r.over_keys(r.dropped(weighted - p * lse_t), r.value);
  if (value_t) out_t = out_t + r.over_keys(r.dropped(p), r.for_query_heads(*value_t));
  return {out_t.to(x.query.scalar_type()), lse_t.squeeze(-1)};
}

TensorTuple<8> attention_backward_backward(const Operands& x, const Tensor& grad_out,
                                           const OptionalTensor& grad_lse,
                                           const Tangents& cotangents, NeedsOfSecond needs) {
  const c10::impl::ExcludeDispatchKeyGuard autocast_off(c10::autocast_dispatch_keyset);
  const auto& [grad_grad_query, grad_grad_key, grad_grad_value, grad_grad_attn_mask,
               grad_grad_alibi_slopes, grad_grad_sinks] = cotangents;
  const Recomputed r(x);
  const Tensor& p = r.softmax.weights;

  const Tensor d_out = grad_out.to(r.real);
  const Tensor dp = r.dropped(r.pairs(d_out, r.value));
  const Tensor out_delta = row_sum(p * dp);  // <dO, O>
  const Tensor delta = grad_lse ? out_delta - grad_lse->unsqueeze(-1) : out_delta;
  const Tensor ds = p * (dp - delta);

  // What is differentiated is <dS, a> + <R ∘ P, b> - <W delta, grad_grad_sinks>, where a comes
  // from the cotangents of dQ, dK (au, before the softcap), of the mask's gradient and the
  // slopes', and b from that of dV.
  Tensor au, a, b, ggq, ggk, ggv;
  if (grad_grad_query) {
    ggq = grad_grad_query->to(r.real);
    add(au, r.pairs(ggq * r.scale, r.key));
  }
  if (grad_grad_key) {
    ggk = r.for_query_heads(*grad_grad_key);
    add(au, r.pairs(r.query * r.scale, ggk));
  }
  if (au.defined()) add(a, r.capped(au));
  if (grad_grad_attn_mask) add(a, r.mask_pairs(*grad_grad_attn_mask));
  if (grad_grad_alibi_slopes) add(a, -r.slope_pairs(*grad_grad_alibi_slopes));
  if (!a.defined()) a = at::zeros_like(p);
  if (grad_grad_value) {
    ggv = r.for_query_heads(*grad_grad_value);
    b = r.dropped(r.pairs(d_out, ggv));
  }

  Tensor a_sum = row_sum(p * a);
  Tensor ggs;
  if (grad_grad_sinks) {
    ggs = grad_grad_sinks->to(r.real).unsqueeze(-1).unsqueeze(-1);
    a_sum = a_sum + r.softmax.sink_weights * ggs;
  }
  const Tensor cot_dp = r.dropped(p * (a - a_sum));
  Tensor cot_p = a * (dp - delta) - a_sum * dp;
  if (b.defined()) cot_p = cot_p + b;
  // Through the softmax over the keys and the sink.
  Tensor mean = row_sum(p * cot_p);
  if (ggs.defined()) mean = mean - r.softmax.sink_weights * ggs * delta;
  const Tensor cot_s = p * (cot_p - mean);
  Tensor cot_u = r.capped(cot_s);
  if (au.defined() && r.cap_curvature.defined()) cot_u = cot_u + ds * au * r.cap_curvature;
  const Tensor du = r.capped(ds);

  std::array<Tensor, 8> grads;
  if (needs[0]) {
    grads[0] = r.over_keys(cot_dp, r.value);
    if (ggv.defined()) add(grads[0], r.over_keys(r.dropped(p), ggv));
    grads[0] = grads[0].to(grad_out.scalar_type());
  }
  if (needs[1]) grads[1] = a_sum.squeeze(-1);
  if (needs[2]) {
    grads[2] = r.over_keys(cot_u, r.key);
    if (ggk.defined()) add(grads[2], r.over_keys(du, ggk));
    grads[2] = (grads[2] * r.scale).to(x.query.scalar_type());
  }
  if (needs[3]) {
    grads[3] = r.over_queries(cot_u, r.query);
    if (ggq.defined()) add(grads[3], r.over_queries(du, ggq));
    grads[3] = (r.for_kv_heads(grads[3]) * r.scale).to(x.key.scalar_type());
  }
  if (needs[4]) {
    grads[4] = r.for_kv_heads(r.over_queries(cot_dp, d_out)).to(x.value.scalar_type());
  }
  if (needs[5]) {
    grads[5] = cot_s.sum_to_size_symint(x.attn_mask->sym_sizes()).to(x.attn_mask->scalar_type());
  }
  if (needs[6]) {
    grads[6] = -(cot_s * reference::distances(x)).sum({-2, -1});
    grads[6] = grads[6].sum_to_size_symint(x.alibi_slopes->sym_sizes());
    grads[6] = grads[6].to(x.alibi_slopes->scalar_type());
  }
  if (needs[7]) {
    const Tensor cot_w = ggs.defined() ? -ggs * delta - mean : -mean;
    grads[7] = (r.softmax.sink_weights * cot_w).sum({-2, -1});
    grads[7] = grads[7].sum_to_size_symint(x.sinks->sym_sizes()).to(x.sinks->scalar_type());
  }
  for (Tensor& grad : grads) {
    if (!grad.defined()) grad = at::empty({0}, x.query.options());
  }
  return std::tuple_cat(grads);
}

}  // namespace qkv::reference
