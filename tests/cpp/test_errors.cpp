// Messages name the operator, the rule and what was found. Python's test_errors.py has the table;
// here are the C++ types, and what only C++ can do wrong.

#include <gtest/gtest.h>
#include <qkv/qkv.h>
#include <torch/torch.h>

namespace {

using torch::Tensor;

template <class Error, class F>
void expect_error(const std::string& message, const F& f) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos)
        << "found: " << std::string(error.what()).substr(0, 300);
    return;
  }
  ADD_FAILURE() << "no error: " << message;
}

const Tensor kX = torch::randn({2, 3, 5, 4});

TEST(Errors, Values) {
  expect_error<c10::ValueError>(
      "qkv::attention: key and value must have the same number of keys, but key has N=5 and value "
      "N=4",
      [] { qkv::attention(kX, kX, kX.slice(2, 0, 4)); });
  expect_error<c10::ValueError>("qkv::attention_with_lse: dropout_p must be between 0 and 1", [] {
    qkv::attention_with_lse(kX, kX, kX, qkv::AttentionOptions().dropout_p(1.5));
  });
  expect_error<c10::ValueError>(
      "qkv::attention: window must be (left, right) with both >= 0, or -1 for unbounded, but is "
      "(-2, 0)",
      [] { qkv::attention(kX, kX, kX, qkv::AttentionOptions().window(-2, 0)); });
}

TEST(Errors, Types) {
  expect_error<c10::TypeError>("qkv::attention: query must be a tensor, but is undefined",
                               [] { qkv::attention(Tensor(), kX, kX); });
  expect_error<c10::TypeError>(
      "qkv::attention: query, key and value must have one dtype, but query is float32 and key is "
      "float64",
      [] { qkv::attention(kX, kX.to(torch::kDouble), kX); });
}

TEST(Errors, WeightsHaveNoDropout) {
  expect_error<c10::ValueError>("qkv::attention_weights: the weights are those before dropout", [] {
    qkv::attention_weights(kX, kX, qkv::AttentionOptions().dropout_p(0.1));
  });
}

TEST(Errors, Modules) {
  using namespace qkv::nn;
  expect_error<c10::ValueError>(
      "qkv::nn::MultiheadAttention: embed_dim must be divisible by num_heads unless head_dim is "
      "given, but embed_dim=10 and num_heads=4",
      [] { MultiheadAttention(10, 4); });
  expect_error<c10::ValueError>(
      "num_kv_heads must divide num_heads, but num_heads=4 and "
      "num_kv_heads=3",
      [] { MultiheadAttention(MultiheadAttentionOptions(8, 4).num_kv_heads(3)); });
  expect_error<c10::ValueError>(
      "qkv::nn::MultiheadAttention: num_heads * head_dim must be less than 2^63, but num_heads=4 "
      "and head_dim=4611686018427387904",
      [] { MultiheadAttention(MultiheadAttentionOptions(8, 4).head_dim(int64_t{1} << 62)); });
  expect_error<c10::ValueError>(
      "qkv::nn::MultiheadAttention: window must be (left, right) with both >= 0, or -1 for "
      "unbounded, but is (-2, 0)",
      [] { MultiheadAttention(MultiheadAttentionOptions(8, 4).window(-2, 0)); });
  expect_error<c10::ValueError>("input must be (.., rows, d_in=8), but has shape [2, 3, 5, 4]",
                                [] { SelfAttention(8, 4)->forward(kX); });
  expect_error<c10::ValueError>("qkv::nn::SelfAttention: d_in must be positive, but is 0",
                                [] { SelfAttention(0, 4); });
  expect_error<c10::ValueError>("query must be (.., rows, embed_dim=8), but has shape [2, 3, 5, 4]",
                                [] { MultiheadAttention(8, 2)->forward(kX); });
  expect_error<c10::TypeError>("MultiheadAttention: query must be a tensor, but is undefined",
                               [] { MultiheadAttention(8, 2)->forward(Tensor()); });
  expect_error<c10::ValueError>("MultiheadAttention: num_kv_heads must be positive, but is 0", [] {
    MultiheadAttention module(4, 2);
    module->options.num_kv_heads(0);
    module(kX);
  });
  for (const std::string file : {"/nonexistent/file", "/dev/full"}) {
    expect_error<c10::ValueError>("qkv::nn::save_state_dict: cannot write " + file,
                                  [&] { save_state_dict(*SelfAttention(8, 4), file); });
  }
  expect_error<c10::TypeError>(
      "key_padding_mask must be bool (true = padding), but is float32", [] {
        MultiheadAttention(4, 2)->forward(kX, {}, {}, {}, torch::zeros({2, 3, 5}));
      });
  expect_error<c10::TypeError>(
      "MultiheadAttention: key_padding_mask must be a dense tensor, but is sparse", [] {
        MultiheadAttention(4, 2)->forward(kX, {}, {}, {},
                                          torch::ones({2, 3, 5}, torch::kBool).to_sparse());
      });
  // The operator would take one of a single key for all of them.
  for (const Tensor& padding :
       {torch::zeros({2, 3, 1}, torch::kBool), torch::zeros({}, torch::kBool)}) {
    const std::string rule = ": key_padding_mask must be (B.., N=5), but has shape ";
    const auto check = [&](const std::string& module, auto call) {
      expect_error<c10::ValueError>("qkv::nn::" + module + rule, call);
    };
    check("MultiheadAttention",
          [&] { MultiheadAttention(4, 2)->forward(kX, {}, {}, {}, padding); });
    check("SelfAttention", [&] { SelfAttention(4, 4)->forward(kX, {}, padding); });
    check("ScaledDotProductAttention",
          [&] { qkv::nn::ScaledDotProductAttention()->forward(kX, {}, {}, {}, padding); });
  }
  expect_error<c10::ValueError>(
      "qkv::nn::SelfAttention: attn_mask must broadcast to (B.., T, T) = [2, 3, 5, 5], but has "
      "shape [2, 5, 5]",
      [] {
        SelfAttention(4, 4)->forward(kX, torch::ones({2, 5, 5}));
      });
}

TEST(Errors, Cache) {
  using qkv::nn::KVCache;
  torch::NoGradGuard no_grad;
  expect_error<c10::ValueError>("max_length must be positive", [] { KVCache(0); });
  KVCache cache(7);
  cache.append(kX, kX);
  expect_error<c10::ValueError>("there is room for 7 keys, but 5 are cached and 5 come",
                                [&] { cache.append(kX, kX); });
  const std::string cached = "cached are keys and values float32 [2, 3, 5, 4] on cpu and float32 ";
  expect_error<c10::ValueError>(cached, [&] {
    cache.append(kX.slice(0, 0, 1).slice(2, 0, 1), kX.slice(0, 0, 1).slice(2, 0, 1));
  });
  expect_error<c10::ValueError>("which float64 [2, 3, 1, 4] on cpu and", [&] {
    const auto x = kX.slice(2, 0, 1).to(torch::kDouble);
    cache.append(x, x);
  });
  expect_error<c10::ValueError>("length must be between 0 and 5, but is 6",
                                [&] { cache.truncate(6); });
  EXPECT_EQ(cache.length(), 5);
  torch::AutoGradMode grad_mode(true);
  expect_error<c10::ValueError>("no gradients flow through a cache", [&] {
    const Tensor x = kX.slice(2, 0, 1).clone().requires_grad_();
    cache.append(x, x);
  });
}

}  // namespace
