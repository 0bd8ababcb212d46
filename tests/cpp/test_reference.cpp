// The reference, which runs on devices without kernels, against the definition. On a CPU no call
// reaches it, so its source is compiled into the tests.

#include <gtest/gtest.h>

#include "arguments.h"
#include "definition.h"
#include "gradcheck.h"
#include "reference.h"
#include "samples.h"

namespace {

using samples::Sample;
using torch::Tensor;

/// What the operator would do with a sample on a device without kernels.
std::vector<Tensor> referred(const Sample& s) {
  const auto& o = s.options;
  qkv::Arguments a;
  a.query = s.query;
  a.key = s.key;
  a.value = s.value;
  a.attn_mask = o.attn_mask();
  a.dropout_p = o.dropout_p();
  a.is_causal = o.is_causal();
  a.scale = o.scale();
  a.enable_gqa = o.enable_gqa();
  if (o.window()) a.window = {o.window()->first, o.window()->second};
  if (o.query_offset()) a.query_offset = *o.query_offset();
  a.softcap = o.softcap();
  a.alibi_slopes = o.alibi_slopes();
  a.sinks = o.sinks();
  a.key_mask = o.key_mask();
  const qkv::Call call = qkv::checked_call("test", a);
  qkv::Operands x = call.operands;
  torch::manual_seed(1);
  if (x.dropout_p > 0.0) {
    x.dropout_seed = torch::randint(std::numeric_limits<int64_t>::max(),
                                    x.query.sizes().slice(0, x.query.dim() - 3), torch::kLong);
  }
  const auto [out, lse] = qkv::reference::attention(x);
  return {call.restore_rank(out), call.restore_rank(lse)};
}

class ReferenceSamples : public ::testing::TestWithParam<Sample> {};

TEST_P(ReferenceSamples, EqualsTheDefinition) {
  const Sample& s = GetParam();
  torch::manual_seed(1);
  const auto expected = definition::attention(s);
  const auto found = referred(s);
  EXPECT_TRUE(torch::allclose(found[0], expected.out, 1e-12, 1e-12));
  EXPECT_TRUE(torch::allclose(found[1], expected.lse, 1e-12, 1e-12));
}

// One of each kind.
class FewReferenceSamples : public ::testing::TestWithParam<Sample> {};

TEST_P(FewReferenceSamples, GradientsOfFirstOrder) {
  const Sample& s = GetParam();
  const auto leaf = [](const Tensor& x) {
    return x.detach().clone(torch::MemoryFormat::Contiguous).requires_grad_();
  };
  std::vector<Tensor> inputs = {leaf(s.query), leaf(s.key), leaf(s.value)};
  const gradcheck::Function f = [&](const std::vector<Tensor>& x) {
    Sample moved = s;
    moved.query = x[0];
    moved.key = x[1];
    moved.value = x[2];
    auto results = referred(moved);
    results[1] = results[1].masked_fill(results[1].isinf(), 0.0);
    return results;
  };
  EXPECT_EQ(gradcheck::first_order(f, inputs), "");
}

const auto by_name = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Table, ReferenceSamples, ::testing::ValuesIn(samples::all()), by_name);
INSTANTIATE_TEST_SUITE_P(
    Table, FewReferenceSamples,
    ::testing::ValuesIn(samples::named({"everything", "gqa_causal", "bool_mask_empty_rows",
                                        "float_mask_minus_inf", "sinks_empty_rows",
                                        "dropout_softcap_alibi_sinks"})),
    by_name);

}  // namespace
