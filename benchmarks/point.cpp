#include "point.h"

#include "limits.h"

namespace {

using torch::Tensor;

torch::ScalarType dtype_of(const std::string& name) {
  if (name == "float64") return torch::kFloat64;
  if (name == "float32") return torch::kFloat32;
  if (name == "bfloat16") return torch::kBFloat16;
  if (name == "float16") return torch::kFloat16;
  throw std::invalid_argument("dtype " + name);
}

/// p - j for every query and key.
Tensor distances(int64_t queries, int64_t keys, int64_t offset) {
  return (torch::arange(queries) + offset).unsqueeze(1) - torch::arange(keys);
}

}  // namespace

Point::Point(const nlohmann::json& json)
    : backward_(json.at("pass") == "backward"),
      causal_(json.value("causal", false)),
      dropout_(json.value("dropout", 0.0)),
      pytorch_can_(!json.contains("softcap") && !json.contains("sinks")),
      has_plain_(json.value("beside_plain", false)) {
  const int64_t batch = json.at("batch"), heads = json.at("heads");
  const int64_t kv_heads = json.value("kv_heads", heads);
  const int64_t queries = json.at("queries"), keys = json.at("keys");
  const int64_t head_dim = json.at("head_dim"), value_dim = json.value("value_dim", head_dim);
  const auto dtype = dtype_of(json.at("dtype"));
  const auto normal = [&](at::IntArrayRef sizes) {
    return torch::randn(sizes, torch::kFloat32).to(dtype).requires_grad_(backward_);
  };
  torch::manual_seed(0);
  query_ = normal({batch, heads, queries, head_dim});
  key_ = normal({batch, kv_heads, keys, head_dim});
  value_ = normal({batch, kv_heads, keys, value_dim});
  grad_out_ = torch::randn({batch, heads, queries, value_dim}, torch::kFloat32).to(dtype);
  inputs_ = {query_, key_, value_};

  plain_.enable_gqa(kv_heads != heads);
  options_ = plain_;
  options_.is_causal(causal_).dropout_p(dropout_);
  if (json.contains("mask")) {
    const auto sizes = json.at("mask").at("shape").get<std::vector<int64_t>>();
    if (json.at("mask").at("dtype") == "bool") {
      mask_ = torch::rand(sizes) < 0.9;
    } else {
      mask_ = torch::randn(sizes).to(dtype);
    }
    if (json.at("mask").value("requires_grad", false)) {
      mask_.requires_grad_();
      inputs_.push_back(mask_);
    }
    options_.attn_mask(mask_);
    pytorch_mask_ = mask_;
  }
  if (json.contains("window")) {
    const auto window = json.at("window").get<std::vector<int64_t>>();
    options_.window(window[0], window[1]);
    const Tensor distance = distances(queries, keys, 0);
    pytorch_mask_ = (distance <= window[0]).logical_and(distance >= -window[1]);
  }
  if (json.value("alibi", false)) {
    const Tensor slopes = torch::pow(2.0, torch::arange(1, heads + 1) * (-8.0 / heads));
    options_.alibi_slopes(slopes);
    pytorch_mask_ = (-slopes.view({heads, 1, 1}) * distances(queries, keys, 0).abs()).to(dtype);
  }
  if (json.value("sinks", false)) options_.sinks(torch::randn({heads}));
  if (json.contains("softcap")) options_.softcap(json.at("softcap"));
}

Tensor Point::pytorch(bool math) const {
  const bool gqa = query_.size(1) != key_.size(1);
  const auto mask = pytorch_mask_.defined() ? std::optional<Tensor>(pytorch_mask_) : std::nullopt;
  if (math) {
    return std::get<0>(at::_scaled_dot_product_attention_math(query_, key_, value_, mask, dropout_,
                                                              causal_, {}, {}, gqa));
  }
  return at::scaled_dot_product_attention(query_, key_, value_, mask, dropout_, causal_, {}, gqa);
}

std::function<void()> Point::timed(const Attention& attention) const {
  if (!backward_) {
    return [attention] {
      const torch::NoGradGuard no_grad;
      attention();
    };
  }
  // Many backward passes through one forward pass.
  return [attention, out = Tensor(), this]() mutable {
    if (!out.defined()) out = attention();
    torch::autograd::grad({out}, inputs_, {grad_out_}, /*retain_graph=*/true,
                          /*create_graph=*/false, /*allow_unused=*/true);
  };
}

std::map<std::string, std::function<void()>> Point::systems() const {
  std::map<std::string, std::function<void()>> systems;
  systems["qkv"] = timed([this] { return qkv::attention(query_, key_, value_, options_); });
  if (has_plain_) {
    systems["plain"] = timed([this] { return qkv::attention(query_, key_, value_, plain_); });
  }
  if (pytorch_can_) {
    systems["sdpa"] = timed([this] { return pytorch(false); });
    // Where it would take gigabytes it is nobody's choice.
    if (query_.size(0) * query_.size(1) * query_.size(2) * key_.size(2) <= int64_t(1) << 27) {
      systems["math"] = timed([this] { return pytorch(true); });
    }
  }
  if (limits::has_float32()) systems["multiply_add_float32"] = limits::multiply_add_float32;
  if (limits::has_bfloat16()) systems["multiply_add_bfloat16"] = limits::multiply_add_bfloat16;
  systems["read"] = [this] {
    limits::read(key_);
    limits::read(value_);
  };
  return systems;
}
