// Forward mode and the double backward on the emulated device, as test_attention.cpp has forward
// and backward: every sample of the table, in every type, against the formulas of the reference in
// float64.

#include <gtest/gtest.h>
#include <qkv/qkv.h>

#include "call.h"
#include "cuda_emulation/operators.h"
#include "cuda_emulation/tensor_cores.h"
#include "reference.h"
#include "samples.h"

namespace {

using namespace emulation;
using samples::Sample;

/// A direction for each differentiable operand, in float64, but numbers of the operands' type.
qkv::Tangents directions(const qkv::Operands& x) {
  torch::manual_seed(5);
  const auto operands = x.tensors();
  qkv::Tangents t;
  for (size_t i = 0; i < t.size(); ++i) {
    if (!is_number(operands[i])) continue;
    t[i] = torch::randn(operands[i]->sizes(), torch::kDouble)
               .to(operands[i]->scalar_type())
               .to(torch::kDouble);
  }
  return t;
}

qkv::Tangents in_types_of(const qkv::Operands& x, qkv::Tangents t) {
  const auto operands = x.tensors();
  for (size_t i = 0; i < t.size(); ++i) {
    if (t[i]) t[i] = t[i]->to(operands[i]->scalar_type());
  }
  return t;
}

qkv::Operands in_double(const qkv::Operands& x) {
  auto tensors = x.tensors();
  for (auto& t : tensors) {
    if (is_number(t)) t = t->to(torch::kDouble);
  }
  return x.with(tensors);
}

qkv::NeedsOfSecond every(const qkv::Operands& x) {
  const auto operands = x.tensors();
  qkv::NeedsOfSecond needs = {true, true};
  for (size_t i = 0; i < qkv::Operands::kDifferentiable; ++i) needs[i + 2] = is_number(operands[i]);
  return needs;
}

/// out_t, lse_t, and then the gradients of the double backward.
using Derivatives = std::vector<Tensor>;

Derivatives expected(const qkv::Operands& x, const qkv::Tangents& t) {
  const qkv::Operands exact = in_double(x);
  const Incoming incoming(x);
  const auto moved = qkv::as_array(qkv::reference::attention_jvp(exact, t));
  const auto grads = qkv::as_array(
      qkv::reference::attention_backward_backward(exact, incoming.out, incoming.lse, t, every(x)));
  Derivatives all(moved.begin(), moved.end());
  all.insert(all.end(), grads.begin(), grads.end());
  return all;
}

Derivatives emulated(const qkv::Operands& x, const qkv::Tangents& directions,
                     const Incoming& incoming) {
  torch::NoGradGuard no_grad;
  const auto [out, lse, out_rest, lse_rest] =
      qkv::InternalOp<qkv::Forward>("qkv::_attention_forward")(x, /*needs_rest=*/true);
  const qkv::Tangents t = in_types_of(x, directions);
  const auto moved = qkv::as_array(
      qkv::InternalOp<qkv::Jvp>("qkv::_attention_jvp")(x, {out, lse, out_rest, lse_rest}, t));
  const auto grads =
      qkv::as_array(qkv::InternalOp<qkv::BackwardBackward>("qkv::_attention_backward_backward")(
          x, incoming.out.to(out.scalar_type()), incoming.lse.to(lse.scalar_type()),
          {out, lse, out_rest, lse_rest}, t, every(x)));
  Derivatives all(moved.begin(), moved.end());
  all.insert(all.end(), grads.begin(), grads.end());
  return all;
}

Derivatives emulated(const qkv::Operands& x, const qkv::Tangents& directions) {
  return emulated(x, directions, Incoming(x));
}

const char* const kNames[] = {"out_t",  "lse_t",    "of grad_out",  "of grad_lse", "of query",
                              "of key", "of value", "of attn_mask", "of slopes",   "of sinks"};

void check(const qkv::Operands& x, torch::ScalarType type, const qkv::Tangents& t) {
  const Derivatives wanted = expected(x, t), found = emulated(x, t);
  expect_no_faults();
  // One rounding to the type, and what sums are off by. Of bfloat16, outputs and what rounding took
  // from them, in two numbers, have 16 bits when rows are summed with them.
  const double rounding = type == torch::kBFloat16 ? 0x1p-8 : type == torch::kHalf ? 0x1p-11 : 0.0;
  const double sums = type == torch::kDouble ? 1e-12 : type == torch::kBFloat16 ? 5e-5 : 1e-5;
  const double tiny = type == torch::kHalf ? 0x1p-24 : 0.0;  // float16's subnormals
  for (size_t i = 0; i < found.size(); ++i) {
    expect_near(found[i], wanted[i], rounding, sums + tiny, kNames[i]);
  }
}

void check(const qkv::Operands& x, torch::ScalarType type) {
  const qkv::Operands moved = converted(x, type);
  check(moved, type, directions(moved));
}

class SecondOrderSamples : public ::testing::TestWithParam<Sample> {};

TEST_P(SecondOrderSamples, Float64) {
  check(samples::call_of(GetParam()).operands, torch::kDouble);
}
TEST_P(SecondOrderSamples, Float32) { check(samples::call_of(GetParam()).operands, torch::kFloat); }
TEST_P(SecondOrderSamples, BFloat16) {
  check(samples::call_of(GetParam()).operands, torch::kBFloat16);
}
TEST_P(SecondOrderSamples, Float16) { check(samples::call_of(GetParam()).operands, torch::kHalf); }

INSTANTIATE_TEST_SUITE_P(Table, SecondOrderSamples, ::testing::ValuesIn(samples::all()),
                         [](const auto& info) { return info.param.name; });

TEST(SecondOrder, SeveralTilesOfEverything) {
  for (const auto type : {torch::kDouble, torch::kFloat, torch::kBFloat16}) check(large(1), type);
}

TEST(SecondOrder, PlainTiles) {
  for (const auto& x : plain_tiles()) check(x, torch::kFloat);
}

/// What stays has no products; each direction alone.
TEST(SecondOrder, EachDirectionAlone) {
  const qkv::Operands x = large(1, 70, 66, 5, 6);
  const qkv::Tangents t = directions(x);
  for (size_t only = 0; only < t.size(); ++only) {
    SCOPED_TRACE(only);
    qkv::Tangents one;
    one[only] = t[only];
    check(x, torch::kDouble, one);
  }
}

TEST(SecondOrder, OperatorsRunTheKernels) {
  const qkv::Operands x = large(1, 20, 30, 5, 6);
  const qkv::Tangents t = directions(x);
  device::take_launches();
  emulated(x, t);
  EXPECT_EQ(
      device::take_launches(),
      (Names{"attention_forward", "attention_jvp", "attention_jvp", "delta", "delta",
             "grad_query_t", "grad_key_t", "mask_gradient_t", "head_gradient", "sink_gradient_t"}));
  expect_no_faults();
}

TEST(SecondOrder, MasksOfEveryBroadcastShape) {
  for (const auto& x : masks_of_every_broadcast_shape()) check(x, torch::kDouble);
}

/// It moves all scores of a row alike. The weights lose something by rounding in the forward, on
/// tensor cores, which must not be multiplied by it: of O' and of the gradient of the query.
TEST(SecondOrder, WhatKeysHaveInCommonMovesNothing) {
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    torch::manual_seed(7);
    qkv::Operands x;
    x.query = torch::randn({1, 2, 20, 16});
    x.key = torch::randn({1, 2, 160, 16}) + 10;
    x.value = torch::randn({1, 2, 160, 16});
    x.sinks = torch::randn({2});
    x.band = {-1, 0, 140};
    x = converted(x, type);
    const qkv::Tangents t = {directions(x)[0]};
    device::set_tensor_cores(true);
    const Derivatives wanted = expected(x, t), found = emulated(x, t);
    device::set_tensor_cores(false);
    expect_no_faults();
    const double rounding = type == torch::kHalf ? 0x1p-11 : 0x1p-8;
    for (const size_t i : {0, 4}) {
      const Tensor error = found[i].to(torch::kDouble) - wanted[i];
      EXPECT_LT(error.norm().item<double>(), rounding * wanted[i].norm().item<double>())
          << kNames[i];
    }
  }
}

/// Far keys, which rows hardly see, say nothing of how the scores move that these are made of.
TEST(SecondOrder, SlopesThatMove) {
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    torch::manual_seed(8);
    qkv::Operands x;
    x.query = torch::randn({1, 2, 20, 16});
    x.key = torch::randn({1, 2, 260, 16});
    x.value = torch::randn({1, 2, 260, 16});
    x.alibi_slopes = torch::tensor({0.5, 0.25});
    x.band = {-1, 0, 240};
    x = converted(x, type);
    qkv::Tangents t;
    t[4] = torch::ones({2}, torch::kDouble);
    device::set_tensor_cores(true);
    const Derivatives wanted = expected(x, t), found = emulated(x, t);
    device::set_tensor_cores(false);
    expect_no_faults();
    const double rounding = type == torch::kHalf ? 0x1p-11 : 0x1p-8;
    const Tensor error = found[0].to(torch::kDouble) - wanted[0];
    EXPECT_LT(error.norm().item<double>(), rounding * wanted[0].norm().item<double>()) << type;
  }
}

/// O' = P V' of many keys, that is as long a sum as a forward's.
TEST(SecondOrder, ErrorsDoNotGrowWithLength) {
  torch::manual_seed(6);
  qkv::Operands x;
  x.query = torch::randn({1, 1, 64, 1});
  x.key = torch::randn({1, 1, 32768, 1});
  x.value = torch::rand({1, 1, 32768, 1});
  x.band = {-1, -1, 0};
  torch::NoGradGuard no_grad;
  const auto [out, lse, out_rest, lse_rest] =
      qkv::InternalOp<qkv::Forward>("qkv::_attention_forward")(x, /*needs_rest=*/true);
  const Tensor along = torch::rand_like(x.value);
  const Tensor found = std::get<0>(qkv::InternalOp<qkv::Jvp>("qkv::_attention_jvp")(
      x, {out, lse, out_rest, lse_rest}, {std::nullopt, std::nullopt, along}));
  x.value = along;
  const Tensor wanted = std::get<0>(qkv::reference::attention(in_double(x)));
  expect_near(found, wanted, 0.0, 1e-6, "out_t");
  expect_no_faults();
}

/// Of one mask there may be many directions: vmap makes such calls. And they may lie in any way.
TEST(SecondOrder, DirectionsNeedNotLieAsTheirOperands) {
  qkv::Operands x = large(2, 20, 30, 5, 6);
  x.attn_mask = torch::randn({20, 30}, torch::kDouble);
  x.alibi_slopes = torch::rand({4}, torch::kDouble);
  qkv::Tangents t = directions(x);
  t[3] = torch::randn({2, 4, 20, 30}, torch::kDouble);
  t[4] = torch::rand({2, 4}, torch::kDouble);
  for (size_t i = 0; i < 4; ++i) t[i] = t[i]->mT().contiguous().mT();
  check(x, torch::kDouble, t);
}

TEST(SecondOrder, WhatNobodyNeedsIsNotComputed) {
  const qkv::Operands x = large(1, 20, 30, 5, 6);
  const Tensor out = torch::randn({1, 4, 20, 6}, torch::kDouble);
  const Tensor lse = torch::randn({1, 4, 20}, torch::kDouble), rest = torch::zeros_like(lse);
  const auto launches = [&](qkv::NeedsOfSecond needs) {
    device::take_launches();
    qkv::InternalOp<qkv::BackwardBackward>("qkv::_attention_backward_backward")(
        x, out, std::nullopt, {out, lse, out.slice(-1, 0, 0), rest}, {x.query}, needs);
    return device::take_launches();
  };
  EXPECT_EQ(launches({true, true}), (Names{"attention_jvp"}));
  EXPECT_EQ(launches({false, false, true}),
            (Names{"attention_jvp", "delta", "delta", "grad_query_t"}));
  EXPECT_EQ(launches({false, false, false, false, true}),
            (Names{"attention_jvp", "delta", "delta", "grad_key_t"}));
  expect_no_faults();
}

bool equal(const Derivatives& a, const Derivatives& b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i) same = torch::equal(a[i], b[i]);
  return same;
}

TEST(SecondOrder, BitsDoNotDependOnTheBatchOrTheGrid) {
  const qkv::Operands two = converted(large(2), torch::kFloat);
  qkv::Tangents t = directions(two);
  const Derivatives of_two = emulated(two, t);
  device::set_order(device::Order::kBackward);
  EXPECT_TRUE(equal(emulated(two, t), of_two)) << "another order of threads and blocks";
  device::set_order(device::Order::kForward);
  for (int64_t largest : {1, 3}) {
    device::set_largest_grid(largest);
    EXPECT_TRUE(equal(emulated(two, t), of_two)) << "a grid of " << largest;
  }
  device::set_largest_grid(INT64_MAX);

  // One batch element alone.
  auto tensors = two.tensors();
  Incoming incoming(two);
  const auto narrow = [](auto& x) { x = x.narrow(0, 1, 1); };
  for (auto& x : tensors) {
    if (x) narrow(*x);
  }
  for (auto& x : t) {
    if (x) narrow(*x);
  }
  narrow(incoming.out);
  narrow(incoming.lse);
  const Derivatives alone = emulated(two.with(tensors), t, incoming);
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_TRUE(torch::equal(alone[i], of_two[i].narrow(0, 1, 1))) << kNames[i];
  }
  expect_no_faults();
}

TEST(SecondOrder, WhatIsMaskedOutCannotMatter) {
  qkv::Operands x = large(1, 70, 139, 9, 11);
  x.key_mask = torch::ones({1, 139}, torch::kBool);
  x.key_mask->slice(1, 60, 80).fill_(false);
  x.attn_mask = x.attn_mask->contiguous();
  x.attn_mask->slice(2, 30, 34).fill_(-INFINITY);  // rows that keep nothing
  const qkv::Tangents t = directions(x);
  const Derivatives clean = emulated(x, t);
  const double poisons[] = {NAN, INFINITY, -INFINITY};
  for (double poison : poisons) {
    const auto poisoned = [&](const Tensor& of, int64_t begin, int64_t end) {
      const Tensor moved = of.clone();
      moved.slice(2, begin, end).fill_(poison);
      return moved;
    };
    qkv::Operands y = x;
    y.query = poisoned(x.query, 30, 34);
    y.key = poisoned(x.key, 60, 80);
    y.value = poisoned(x.value, 60, 80);
    qkv::Tangents d = t;
    d[0] = poisoned(*t[0], 30, 34);
    d[1] = poisoned(*t[1], 60, 80);
    d[2] = poisoned(*t[2], 60, 80);
    d[3] = t[3]->masked_fill(*x.attn_mask == -INFINITY, poison);
    const Derivatives dirty = emulated(y, d);
    for (size_t i = 0; i < dirty.size(); ++i) {
      EXPECT_TRUE(torch::equal(dirty[i], clean[i])) << kNames[i] << " with " << poison;
    }
  }
  expect_no_faults();
}

TEST(SecondOrder, ScoresOfAnySizeAreFinite) {
  qkv::Operands x = large(1, 5, 70, 4, 3);
  x.softcap = 0.0;
  x.query.mul_(1e4);
  x.key.mul_(1e4);
  x = converted(x, torch::kFloat);
  for (const Tensor& found : emulated(x, directions(x))) {
    EXPECT_TRUE(found.isfinite().all().item<bool>());
  }
  expect_no_faults();
}

}  // namespace
