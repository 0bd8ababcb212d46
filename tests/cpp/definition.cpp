#include "definition.h"

#include <array>
#include <cmath>
#include <limits>

namespace definition {

namespace {

using torch::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// x broadcast to `shape`, with the batch dimensions joined into one.
Tensor joined(const std::optional<Tensor>& x, const std::vector<int64_t>& batch,
              std::vector<int64_t> inner) {
  if (!x) return {};
  std::vector<int64_t> shape = batch;
  shape.insert(shape.end(), inner.begin(), inner.end());
  int64_t count = 1;
  for (int64_t size : batch) count *= size;
  inner.insert(inner.begin(), count);
  return x->expand(shape).contiguous().view(inner);
}

/// The 16 random bits of weight (i, j) of head h: Philox4x32-10 (Salmon et al., SC 2011).
uint32_t random_bits(uint64_t seed, uint32_t h, uint32_t i, uint32_t j) {
  std::array<uint32_t, 4> c = {j / 8, i, h, 0};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    c = {uint32_t(b >> 32) ^ c[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k1, uint32_t(a)};
  }
  return c[j % 8 / 2] >> (j % 2 * 16) & 0xffff;
}

}  // namespace

Result attention(const samples::Sample& s) {
  const auto& o = s.options;
  const auto with_head = [](const Tensor& x) { return x.dim() == 2 ? x.unsqueeze(0) : x; };
  Tensor q = with_head(s.query), k = with_head(s.key), v = with_head(s.value);
  const auto batch_of = [](const Tensor& x) { return x.sizes().slice(0, x.dim() - 3); };
  const std::vector<int64_t> batch = at::infer_size(batch_of(q), batch_of(k));
  const int64_t kv_heads = k.size(-3), heads = std::max(q.size(-3), kv_heads) * (q.size(-3) != 0);
  const int64_t m = q.size(-2), n = k.size(-2), d = q.size(-1), dv = v.size(-1);
  q = joined(q, batch, {heads, m, d});
  k = joined(k, batch, {kv_heads, n, d});
  v = joined(v, batch, {kv_heads, n, dv});
  const Tensor mask = joined(o.attn_mask(), batch, {heads, m, n});
  const Tensor key_mask = joined(o.key_mask(), batch, {n});
  const Tensor slopes = joined(o.alibi_slopes(), batch, {heads});
  const Tensor sinks = joined(o.sinks(), batch, {heads});
  const bool is_bool = mask.defined() && mask.scalar_type() == torch::kBool;
  const double scale = o.scale().value_or(d == 0 ? 1.0 : 1.0 / std::sqrt(double(d)));
  const int64_t offset = o.query_offset().value_or(0);

  const auto threshold = uint32_t(std::llround(o.dropout_p() * 65536));
  const Tensor seeds = torch::randint(std::numeric_limits<int64_t>::max(), batch, torch::kLong);

  Result r{torch::zeros({q.size(0), heads, m, dv}, torch::kDouble),
           torch::zeros({q.size(0), heads, m}, torch::kDouble),
           torch::zeros({q.size(0), heads, m, n}, torch::kDouble)};
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t g = h / (heads / kv_heads);
      const auto q_bh = q[b][h], k_bg = k[b][g], v_bg = v[b][g];
      const auto qa = q_bh.accessor<double, 2>(), ka = k_bg.accessor<double, 2>(),
                 va = v_bg.accessor<double, 2>();
      for (int64_t i = 0; i < m; ++i) {
        const int64_t p = i + offset;
        std::vector<double> scores(n, -kInfinity);  // -inf: not kept
        double max = sinks.defined() ? sinks[b][h].item<double>() : -kInfinity;
        for (int64_t j = 0; j < n; ++j) {
          bool keep = !o.is_causal() || j <= p;
          if (o.window() && o.window()->first >= 0) keep = keep && j >= p - o.window()->first;
          if (o.window() && o.window()->second >= 0) keep = keep && j <= p + o.window()->second;
          if (key_mask.defined()) keep = keep && key_mask.const_data_ptr<bool>()[b * n + j];
          const int64_t at = ((b * heads + h) * m + i) * n + j;
          if (is_bool) keep = keep && mask.const_data_ptr<bool>()[at];
          if (mask.defined() && !is_bool) {
            keep = keep && mask.const_data_ptr<double>()[at] != -kInfinity;
          }
          if (!keep) continue;
          double score = 0.0;
          for (int64_t x = 0; x < d; ++x) score += qa[i][x] * ka[j][x];
          score *= scale;
          if (o.softcap() != 0.0) score = o.softcap() * std::tanh(score / o.softcap());
          if (mask.defined() && !is_bool) score += mask.const_data_ptr<double>()[at];
          if (slopes.defined()) score -= slopes[b][h].item<double>() * std::abs(double(p - j));
          scores[j] = score;
          max = std::max(max, score);
        }
        double sum = sinks.defined() ? std::exp(sinks[b][h].item<double>() - max) : 0.0;
        for (double score : scores) sum += score == -kInfinity ? 0.0 : std::exp(score - max);
        const double lse = sum == 0.0 ? -kInfinity : max + std::log(sum);
        r.lse[b][h][i] = lse;
        auto out = r.out.data_ptr<double>() + ((b * heads + h) * m + i) * dv;
        auto weights = r.weights.data_ptr<double>() + ((b * heads + h) * m + i) * n;
        for (int64_t j = 0; j < n; ++j) {
          if (scores[j] == -kInfinity) continue;
          weights[j] = std::exp(scores[j] - lse);
          if (threshold > 0 &&
              random_bits(seeds.view(-1)[b].item<int64_t>(), h, i, j) < threshold) {
            continue;
          }
          const double used = weights[j] * (65536.0 / (65536 - threshold));
          for (int64_t x = 0; x < dv; ++x) out[x] += used * va[j][x];
        }
      }
    }
  }

  const bool unbatched = s.query.dim() == 2 && s.key.dim() == 2;
  const auto restored = [&](const Tensor& x) {
    std::vector<int64_t> shape = batch;
    if (!unbatched) shape.push_back(heads);
    shape.insert(shape.end(), x.sizes().begin() + 2, x.sizes().end());
    return x.view(shape);
  };
  return {restored(r.out), restored(r.lse), restored(r.weights)};
}

}  // namespace definition
