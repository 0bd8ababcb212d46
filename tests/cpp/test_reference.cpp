// The reference, which runs on devices without kernels, against the definition; and the kernels of
// second order against its formulas. On a CPU no call reaches them (but for third derivatives), so
// their source is compiled into the tests.

#include <gtest/gtest.h>

#include "call.h"
#include "definition.h"
#include "gradcheck.h"
#include "internal_op.h"
#include "reference.h"
#include "samples.h"

namespace {

using samples::Sample;
using torch::Tensor;

/// What the operator would do with a sample on a device without kernels.
std::vector<Tensor> referred(const Sample& s) {
  const qkv::Call call = samples::call_of(s);
  const auto [out, lse] = qkv::reference::attention(call.operands);
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

bool near(const Tensor& a, const Tensor& b) {
  const Tensor scale = b.numel() == 0 ? torch::ones({}) : b.abs().max().clamp_min(1.0);
  return a.sizes() == b.sizes() && torch::allclose(a / scale, b / scale, 0.0, 1e-12);
}

TEST_P(ReferenceSamples, KernelsOfSecondOrderEqualItsFormulas) {
  torch::NoGradGuard no_grad;
  const qkv::Operands x = samples::call_of(GetParam()).operands;
  const auto operands = x.tensors();
  const auto [out, lse, out_rest, lse_rest] =
      qkv::InternalOp<qkv::Forward>("qkv::_attention_forward")(x, /*needs_rest=*/true);
  const qkv::ForwardResults forward{out, lse, out_rest, lse_rest};
  qkv::Tangents t;
  qkv::NeedsOfSecond needs = {true, true};
  for (size_t i = 0; i < t.size(); ++i) {
    needs[i + 2] = operands[i] && operands[i]->is_floating_point();
    if (needs[i + 2]) t[i] = torch::randn_like(*operands[i]);
  }
  const Tensor grad_out = torch::randn_like(out), grad_lse = torch::randn_like(lse);
  const qkv::InternalOp<qkv::Jvp> jvp("qkv::_attention_jvp");
  const qkv::InternalOp<qkv::BackwardBackward> second("qkv::_attention_backward_backward");
  // All directions, and each alone.
  for (size_t only = 0; only <= t.size(); ++only) {
    qkv::Tangents d;
    for (size_t i = 0; i < t.size(); ++i) {
      if (only == t.size() || only == i) d[i] = t[i];
    }
    const auto moved = qkv::as_array(jvp(x, forward, d));
    const auto moved_expected = qkv::as_array(qkv::reference::attention_jvp(x, d));
    for (size_t i = 0; i < moved.size(); ++i) {
      EXPECT_TRUE(near(moved[i], moved_expected[i])) << "jvp " << i << " along " << only;
    }
    const auto grads = qkv::as_array(second(x, grad_out, grad_lse, forward, d, needs));
    const auto expected =
        qkv::as_array(qkv::reference::attention_backward_backward(x, grad_out, grad_lse, d, needs));
    for (size_t i = 0; i < grads.size(); ++i) {
      EXPECT_TRUE(near(grads[i], expected[i])) << "gradient " << i << " along " << only;
    }
  }
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
