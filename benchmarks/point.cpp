#include "point.h"

#include <torch/csrc/autograd/forward_grad.h>

#include "limits.h"
#include "memory.h"

namespace {

using torch::Tensor;

torch::ScalarType dtype_of(const std::string& name) {
  if (name == "float64") return torch::kFloat64;
  if (name == "float32") return torch::kFloat32;
  if (name == "bfloat16") return torch::kBFloat16;
  if (name == "float16") return torch::kFloat16;
  throw std::invalid_argument("dtype " + name);
}

Pass pass_of(const std::string& name) {
  if (name == "forward") return Pass::kForward;
  if (name == "backward") return Pass::kBackward;
  if (name == "double_backward") return Pass::kDoubleBackward;
  if (name == "jvp") return Pass::kJvp;
  if (name == "jvp_query") return Pass::kJvpOfQuery;
  throw std::invalid_argument("pass " + name);
}

bool is_backward(Pass pass) { return pass == Pass::kBackward || pass == Pass::kDoubleBackward; }
bool is_first_order(Pass pass) { return pass == Pass::kForward || pass == Pass::kBackward; }

/// p - j for every query and key.
Tensor distances(int64_t queries, int64_t keys, int64_t offset) {
  return (torch::arange(queries) + offset).unsqueeze(1) - torch::arange(keys);
}

}  // namespace

Point::Point(const nlohmann::json& json)
    : pass_(pass_of(json.at("pass"))),
      causal_(json.value("causal", false)),
      dropout_(json.value("dropout", 0.0)),
      pytorch_can_(!json.contains("softcap") && !json.contains("sinks")),
      has_plain_(json.value("beside_plain", false)) {
  const int64_t batch = json.at("batch"), heads = json.at("heads");
  const int64_t kv_heads = json.value("kv_heads", heads);
  const int64_t queries = json.at("queries"), keys = json.at("keys");
  const int64_t head_dim = json.at("head_dim"), value_dim = json.value("value_dim", head_dim);
  const auto dtype = dtype_of(json.at("dtype"));
  // (B, N, H, D) in memory, as projections leave them.
  const bool heads_last = json.value("heads_last", false);
  const auto normal = [&](int64_t of_heads, int64_t rows, int64_t width) {
    const Tensor x = heads_last ? torch::randn({batch, rows, of_heads, width}).transpose(1, 2)
                                : torch::randn({batch, of_heads, rows, width});
    return x.to(dtype);
  };
  torch::manual_seed(0);
  query_ = normal(heads, queries, head_dim).requires_grad_(is_backward(pass_));
  key_ = normal(kv_heads, keys, head_dim).requires_grad_(is_backward(pass_));
  value_ = normal(kv_heads, keys, value_dim).requires_grad_(is_backward(pass_));
  grad_out_ = normal(heads, queries, value_dim);
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
  if (is_first_order(pass_)) return;
  for (const Tensor& x : inputs_) directions_.push_back(torch::randn_like(x).detach());
  if (pass_ == Pass::kDoubleBackward) grad_out_.requires_grad_();
}

Point::Attention Point::ours(const qkv::AttentionOptions& options) const {
  return [options](const Tensor& query, const Tensor& key, const Tensor& value) {
    return qkv::attention(query, key, value, options);
  };
}

Point::Attention Point::pytorch(bool math) const {
  const bool gqa = query_.size(1) != key_.size(1);
  const auto mask = pytorch_mask_.defined() ? std::optional<Tensor>(pytorch_mask_) : std::nullopt;
  return [=, this](const Tensor& query, const Tensor& key, const Tensor& value) {
    if (math) {
      return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout_,
                                                                causal_, {}, {}, gqa));
    }
    return at::scaled_dot_product_attention(query, key, value, mask, dropout_, causal_, {}, gqa);
  };
}

std::function<void()> Point::timed(Pass pass, const Attention& attention) const {
  switch (pass) {
    case Pass::kForward:
      return [attention, this] {
        const torch::NoGradGuard no_grad;
        attention(query_, key_, value_);
      };
    case Pass::kBackward:
      // Many backward passes through one forward pass.
      return [attention, out = Tensor(), this]() mutable {
        if (!out.defined()) out = attention(query_, key_, value_);
        torch::autograd::grad({out}, inputs_, {grad_out_}, /*retain_graph=*/true,
                              /*create_graph=*/false, /*allow_unused=*/true);
      };
    case Pass::kDoubleBackward:
      // Many of them through one forward and one backward, with all cotangents, for all gradients.
      return [attention, grads = std::vector<Tensor>(), this]() mutable {
        if (grads.empty()) {
          grads = torch::autograd::grad({attention(query_, key_, value_)}, inputs_, {grad_out_},
                                        /*retain_graph=*/true, /*create_graph=*/true);
        }
        auto wanted = inputs_;
        wanted.push_back(grad_out_);
        torch::autograd::grad(grads, wanted, directions_, /*retain_graph=*/true);
      };
    case Pass::kJvp:
    case Pass::kJvpOfQuery:
      return [attention, pass, this] {
        const torch::NoGradGuard no_grad;
        const auto level = torch::autograd::ForwardADLevel::get_next_idx();
        std::vector<Tensor> x = {query_, key_, value_};
        const size_t moved = pass == Pass::kJvp ? x.size() : 1;
        for (size_t i = 0; i < moved; ++i) {
          x[i] = at::_make_dual(x[i], directions_[i], static_cast<int64_t>(level));
        }
        attention(x[0], x[1], x[2]);
        x.clear();  // a level is left without tensors of it
        torch::autograd::ForwardADLevel::release_idx(level);
      };
  }
  throw std::logic_error("pass");
}

bool Point::has_math() const {
  const int64_t scores = query_.size(0) * query_.size(1) * query_.size(2) * key_.size(2);
  if (!pytorch_can_) return false;
  // Where it would take gigabytes it is nobody's choice; of second order it is the only one.
  if (is_first_order(pass_)) return scores <= int64_t(1) << 27;
  // All scores this often, of float32 for types of 16 bits too; measured, and a few more.
  constexpr int64_t kMatrices = 16;
  const int64_t number = query_.scalar_type() == torch::kDouble ? 8 : 4;
  return kMatrices * scores * number <= memory::available();
}

std::map<std::string, std::function<void()>> Point::systems() const {
  std::map<std::string, std::function<void()>> systems;
  systems["qkv"] = timed(pass_, ours(options_));
  if (has_plain_) systems["plain"] = timed(pass_, ours(plain_));
  if (is_first_order(pass_)) {
    if (pytorch_can_) systems["sdpa"] = timed(pass_, pytorch(false));
  } else {
    const Pass first = pass_ == Pass::kDoubleBackward ? Pass::kBackward : Pass::kForward;
    systems["first_order"] = timed(first, ours(options_));
  }
  if (has_math()) systems["math"] = timed(pass_, pytorch(true));
  if (limits::has_float32()) systems["multiply_add_float32"] = limits::multiply_add_float32;
  if (limits::has_bfloat16()) systems["multiply_add_bfloat16"] = limits::multiply_add_bfloat16;
  if (limits::has_float16()) systems["multiply_add_float16"] = limits::multiply_add_float16;
  systems["read"] = [this] {
    limits::read(key_);
    limits::read(value_);
  };
  return systems;
}
