// The C++ front door: values against the definition, gradients by numerical differences, for every
// sample of the table.

#include <gtest/gtest.h>
#include <qkv/qkv.h>

#include <map>
#include <string>

#include "definition.h"
#include "gradcheck.h"
#include "samples.h"

namespace {

using samples::Sample;
using torch::Tensor;

::testing::AssertionResult near(const Tensor& actual, const Tensor& expected, double tolerance) {
  if (actual.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure()
           << "shape " << actual.sizes() << ", expected " << expected.sizes();
  }
  const Tensor finite = expected.isfinite();
  if (!torch::equal(actual.masked_select(~finite).to(torch::kDouble),
                    expected.masked_select(~finite))) {
    return ::testing::AssertionFailure() << "infinities differ";
  }
  if (!torch::allclose(actual.masked_select(finite).to(torch::kDouble),
                       expected.masked_select(finite), tolerance, tolerance)) {
    return ::testing::AssertionFailure() << "numbers differ";
  }
  return ::testing::AssertionSuccess();
}

// What dropout drops is a function of the generator's state.
auto called(const Sample& s) {
  torch::manual_seed(1);
  return qkv::attention_with_lse(s.query, s.key, s.value, s.options);
}

definition::Result defined(const Sample& s) {
  torch::manual_seed(1);
  return definition::attention(s);
}

class AttentionSamples : public ::testing::TestWithParam<Sample> {};

TEST_P(AttentionSamples, EqualsTheDefinition) {
  const Sample& s = GetParam();
  const auto expected = defined(s);
  const auto [out, lse] = called(s);
  EXPECT_TRUE(near(out, expected.out, 1e-12));
  EXPECT_TRUE(near(lse, expected.lse, 1e-12));
  torch::manual_seed(1);
  EXPECT_TRUE(torch::equal(qkv::attention(s.query, s.key, s.value, s.options), out));
  const auto options = qkv::AttentionOptions(s.options).dropout_p(0.0);
  EXPECT_TRUE(near(qkv::attention_weights(s.query, s.key, options), expected.weights, 1e-12));
}

TEST_P(AttentionSamples, EqualsTheDefinitionInFloat32) {
  Sample s = GetParam();
  const auto convert = [&s](const auto& converted) {
    s.query = converted(s.query);
    s.key = converted(s.key);
    s.value = converted(s.value);
    auto& o = s.options;
    if (o.attn_mask() && o.attn_mask()->is_floating_point()) o.attn_mask(converted(*o.attn_mask()));
    if (o.alibi_slopes()) o.alibi_slopes(converted(*o.alibi_slopes()));
    if (o.sinks()) o.sinks(converted(*o.sinks()));
  };
  convert([](const Tensor& x) { return x.to(torch::kFloat).to(torch::kDouble); });
  const auto expected = defined(s);
  convert([](const Tensor& x) { return x.to(torch::kFloat); });
  const auto [out, lse] = called(s);
  EXPECT_EQ(out.scalar_type(), torch::kFloat);
  EXPECT_TRUE(near(out, expected.out, 5e-6));
  EXPECT_TRUE(near(lse, expected.lse, 5e-6));
}

TEST_P(AttentionSamples, OutputLiesAsTheQueryDoes) {
  const Sample& s = GetParam();
  const Tensor out = qkv::attention(s.query, s.key, s.value, s.options);
  EXPECT_TRUE(out.is_non_overlapping_and_dense());
  if (out.sizes() == s.query.sizes()) {
    EXPECT_EQ(out.strides(), torch::empty_like(s.query).strides());
  }
}

using Check = std::string(const gradcheck::Function&, const std::vector<Tensor>&,
                          const gradcheck::Options&);

std::string checked(Check check, const Sample& s) {
  std::vector<Tensor> inputs;
  const auto input = [&inputs](const Tensor& x) {
    inputs.push_back(x.detach().clone(torch::MemoryFormat::Contiguous).requires_grad_());
  };
  for (const Tensor& x : {s.query, s.key, s.value}) input(x);
  const bool float_mask = s.options.attn_mask() && s.options.attn_mask()->is_floating_point();
  if (float_mask) input(*s.options.attn_mask());
  if (s.options.alibi_slopes()) input(*s.options.alibi_slopes());
  if (s.options.sinks()) input(*s.options.sinks());
  const gradcheck::Function f = [&](const std::vector<Tensor>& x) {
    Sample moved = s;
    size_t next = 0;
    for (Tensor* tensor : {&moved.query, &moved.key, &moved.value}) *tensor = x[next++];
    if (float_mask) moved.options.attn_mask(x[next++]);
    if (s.options.alibi_slopes()) moved.options.alibi_slopes(x[next++]);
    if (s.options.sinks()) moved.options.sinks(x[next++]);
    const auto [out, lse] = called(moved);
    return std::vector<Tensor>{out, lse.masked_fill(lse.isinf(), 0.0)};
  };
  return check(f, inputs, {});
}

class SmallSamples : public ::testing::TestWithParam<Sample> {};

TEST_P(SmallSamples, GradientsOfFirstOrder) {
  EXPECT_EQ(checked(gradcheck::first_order, GetParam()), "");
}

TEST_P(SmallSamples, ForwardMode) { EXPECT_EQ(checked(gradcheck::forward_mode, GetParam()), ""); }

TEST_P(SmallSamples, ForwardOverReverse) {
  EXPECT_EQ(checked(gradcheck::forward_over_reverse, GetParam()), "");
}

// One of each kind; Python checks the whole table.
class FewSamples : public ::testing::TestWithParam<Sample> {};

TEST_P(FewSamples, GradientsOfSecondOrder) {
  EXPECT_EQ(checked(gradcheck::second_order, GetParam()), "");
}

// What Python draws by hypothesis, in a process without it.
TEST(RandomSamples, GradientsOfSecondOrderAndForwardOverReverse) {
  std::map<std::string, int> with;
  int with_output = 0;
  for (const Sample& s : samples::random(50)) {
    SCOPED_TRACE(s.name);
    EXPECT_EQ(checked(gradcheck::second_order, s), "");
    EXPECT_EQ(checked(gradcheck::forward_over_reverse, s), "");
    with_output += std::get<0>(called(s)).any().item<bool>();
    const auto& o = s.options;
    with["group"] += s.query.size(-3) != s.key.size(-3);
    with["causal"] += o.is_causal();
    with["window"] += o.window().has_value();
    with["offset"] += o.query_offset().has_value();
    with["scale"] += o.scale().has_value();
    with["softcap"] += o.softcap() > 0;
    with["dropout"] += o.dropout_p() > 0;
    with["float mask"] += o.attn_mask() && o.attn_mask()->is_floating_point();
    with["bool mask"] += o.attn_mask() && !o.attn_mask()->is_floating_point();
    with["key mask"] += o.key_mask().has_value();
    with["slopes"] += o.alibi_slopes().has_value();
    with["sinks"] += o.sinks().has_value();
  }
  for (const auto& [option, count] : with) EXPECT_GE(count, 3) << option;
  EXPECT_GE(with_output, 30);  // masks leave something of most
}

const auto by_name = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Table, AttentionSamples, ::testing::ValuesIn(samples::all()), by_name);
INSTANTIATE_TEST_SUITE_P(Table, SmallSamples, ::testing::ValuesIn(samples::small()), by_name);
INSTANTIATE_TEST_SUITE_P(Table, FewSamples,
                         ::testing::ValuesIn(samples::named({"causal", "everything",
                                                             "float_mask_of_keys",
                                                             "dropout_softcap_alibi_sinks"})),
                         by_name);

TEST(Attention, DropsEvenlyAndReproducibly) {
  const Tensor q = torch::zeros({2, 3, 40, 8}), k = torch::zeros({2, 3, 500, 8});
  const Tensor v = torch::ones({2, 3, 500, 1});
  const auto options = qkv::AttentionOptions().dropout_p(0.25);
  torch::manual_seed(1);
  const Tensor a = qkv::attention(q, k, v, options);
  torch::manual_seed(1);
  EXPECT_TRUE(torch::equal(a, qkv::attention(q, k, v, options)));
  EXPECT_FALSE(torch::equal(a, qkv::attention(q, k, v, options)));
  // Each row's sum of kept weights has mean 1 and standard deviation sqrt(p / (1 - p) / 500).
  EXPECT_NEAR(a.mean().item<double>(), 1.0, 5 * 0.0258 / std::sqrt(240.0));
  EXPECT_NEAR(a.std().item<double>(), 0.0258, 0.006);
  EXPECT_TRUE(torch::equal(qkv::attention(q, k, v, qkv::AttentionOptions().dropout_p(1.0)),
                           torch::zeros({2, 3, 40, 1})));
}

TEST(Attention, UndefinedOptionsAreNone) {
  const Tensor x = torch::randn({1, 1, 3, 4});
  EXPECT_TRUE(torch::equal(qkv::attention(x, x, x, qkv::AttentionOptions().attn_mask(Tensor())),
                           qkv::attention(x, x, x)));
}

TEST(Attention, SaysWhatItRuns) {
  const Tensor x = torch::randn({2, 4, 3, 8});
  const std::string fused = qkv::explain(x, x, x, qkv::AttentionOptions().is_causal(true));
  EXPECT_NE(fused.find("fused cpu float32"), std::string::npos) << fused;
  EXPECT_NE(fused.find("B=[2] Hq=4 Hkv=4 M=3 N=3 D=8 Dv=8"), std::string::npos) << fused;
  EXPECT_NE(fused.find("jvp of a jvp       unfused"), std::string::npos) << fused;
  EXPECT_EQ(fused.find("products"), std::string::npos) << fused;
  const Tensor halves = x.to(torch::kBFloat16);
  EXPECT_NE(qkv::explain(halves, halves, halves).find("products           forward "),
            std::string::npos);
}

TEST(Attention, KnowsItsVersion) {
  EXPECT_STREQ(qkv::version(), QKV_VERSION);
  EXPECT_EQ(std::string(qkv::torch_version()), TORCH_VERSION);
}

}  // namespace
