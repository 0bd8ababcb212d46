// The kernels of a GPU on the emulated device, called by the operators themselves: this program
// registers them in place of the CPU's. Every sample of the table, in every type, against the
// definition and the gradients of the reference, both in float64.

#include <gtest/gtest.h>
#include <qkv/qkv.h>

#include "call.h"
#include "cuda_emulation/operators.h"
#include "definition.h"
#include "reference.h"
#include "samples.h"

namespace {

using namespace emulation;
using samples::Sample;

struct Results {
  Tensor out, lse;
  std::vector<Tensor> grads;  // of the differentiable operands, undefined where there is none
};

Results expected(const qkv::Operands& x) {
  auto tensors = x.tensors();
  std::vector<Tensor> leaves;
  for (auto& t : tensors) {
    if (!is_number(t)) continue;
    t = t->detach().to(torch::kDouble).contiguous().clone().requires_grad_();
    leaves.push_back(*t);
  }
  const auto [out, lse] = qkv::reference::attention(x.with(tensors));
  const Incoming incoming(x);
  const auto grads = torch::autograd::grad({out, lse}, leaves, {incoming.out, incoming.lse},
                                           /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                                           /*allow_unused=*/true);
  Results r{out.detach(), lse.detach(), {}};
  size_t next = 0;
  for (size_t i = 0; i < qkv::Operands::kDifferentiable; ++i) {
    r.grads.push_back(is_number(tensors[i]) ? grads[next++] : Tensor());
  }
  return r;
}

Results emulated(const qkv::Operands& x) {
  torch::NoGradGuard no_grad;
  const auto [out, lse, out_rest, lse_rest] =
      qkv::InternalOp<qkv::Forward>("qkv::_attention_forward")(x, /*needs_rest=*/true);
  const Incoming incoming(x);
  const auto tensors = x.tensors();
  qkv::Needs needs;
  for (size_t i = 0; i < needs.size(); ++i) needs[i] = is_number(tensors[i]);
  const auto grads = qkv::as_array(qkv::InternalOp<qkv::Backward>("qkv::_attention_backward")(
      x, incoming.out.to(out.scalar_type()), incoming.lse.to(lse.scalar_type()),
      {out, lse, out_rest, lse_rest}, needs));
  Results r{out, lse, {}};
  for (size_t i = 0; i < needs.size(); ++i) r.grads.push_back(needs[i] ? grads[i] : Tensor());
  return r;
}

void check(const qkv::Operands& x, torch::ScalarType type) {
  const qkv::Operands moved = converted(x, type);
  const Results wanted = expected(moved);
  const Results found = emulated(moved);
  expect_no_faults();
  // One rounding to the type, and what sums are off by.
  const double rounding = type == torch::kBFloat16 ? 0x1p-8 : type == torch::kHalf ? 0x1p-11 : 0.0;
  const double sums = type == torch::kDouble ? 1e-12 : 1e-5;
  const double tiny = type == torch::kHalf ? 0x1p-24 : 0.0;  // float16's subnormals
  expect_near(found.out, wanted.out, rounding, sums + tiny, "out");
  expect_near(found.lse, wanted.lse, 0.0, sums, "lse");
  const char* const names[] = {"query", "key", "value", "attn_mask", "alibi_slopes", "sinks"};
  for (size_t i = 0; i < found.grads.size(); ++i) {
    if (!wanted.grads[i].defined()) continue;
    expect_near(found.grads[i], wanted.grads[i], rounding, sums + tiny,
                std::string("gradient of ") + names[i]);
  }
}

class EmulatedSamples : public ::testing::TestWithParam<Sample> {};

TEST_P(EmulatedSamples, Float64) { check(samples::call_of(GetParam()).operands, torch::kDouble); }
TEST_P(EmulatedSamples, Float32) { check(samples::call_of(GetParam()).operands, torch::kFloat); }
TEST_P(EmulatedSamples, BFloat16) {
  check(samples::call_of(GetParam()).operands, torch::kBFloat16);
}
TEST_P(EmulatedSamples, Float16) { check(samples::call_of(GetParam()).operands, torch::kHalf); }

TEST_P(EmulatedSamples, ForwardEqualsTheDefinition) {
  const Sample& s = GetParam();
  torch::manual_seed(1);
  const auto wanted = definition::attention(s);
  const qkv::Call call = samples::call_of(s);
  torch::NoGradGuard no_grad;
  const auto results =
      qkv::InternalOp<qkv::Forward>("qkv::_attention_forward")(call.operands, /*needs_rest=*/true);
  expect_no_faults();
  expect_near(call.restore_rank(std::get<0>(results)), wanted.out, 0.0, 1e-12, "out");
  expect_near(call.restore_rank(std::get<1>(results)), wanted.lse, 0.0, 1e-12, "lse");
}

INSTANTIATE_TEST_SUITE_P(Table, EmulatedSamples, ::testing::ValuesIn(samples::all()),
                         [](const auto& info) { return info.param.name; });

TEST(Emulated, SeveralTilesOfEverything) {
  for (const auto type : {torch::kDouble, torch::kFloat, torch::kBFloat16}) check(large(1), type);
}

TEST(Emulated, OperatorsRunTheKernels) {
  device::take_launches();
  emulated(large(1));
  EXPECT_EQ(device::take_launches(), (Names{"attention_forward", "delta", "grad_query", "grad_key",
                                            "mask_gradient", "head_gradient"}));
  for (int64_t queries : {1, 2, 5}) {
    emulated(large(1, queries, 1100, 3, 3));
    const Names names = device::take_launches();
    EXPECT_EQ(names[0], "few_rows");
    EXPECT_EQ(names[1], "merge_forward");
  }
  expect_no_faults();
}

TEST(Emulated, PlainTiles) {
  for (const auto& x : plain_tiles()) check(x, torch::kFloat);
}

TEST(Emulated, FewRowsAndManyKeys) {
  qkv::Operands x = large(1, 3, 1700, 20, 17);
  x.band = {-1, -1, 0};
  for (const auto type : {torch::kDouble, torch::kFloat, torch::kHalf}) check(x, type);
  for (int64_t queries : {1, 2, 8}) check(large(2, queries, 70, 20, 140), torch::kFloat);
}

TEST(Emulated, MasksOfEveryBroadcastShape) {
  for (const auto& x : masks_of_every_broadcast_shape()) check(x, torch::kDouble);
}

bool equal(const Results& a, const Results& b) {
  bool same = torch::equal(a.out, b.out) && torch::equal(a.lse, b.lse);
  for (size_t i = 0; i < 3; ++i) same = same && torch::equal(a.grads[i], b.grads[i]);
  return same;
}

TEST(Emulated, BitsDoNotDependOnTheBatchOrTheGrid) {
  const qkv::Operands two = converted(large(2), torch::kFloat);
  auto tensors = two.tensors();
  const Results of_two = emulated(two);
  device::set_order(device::Order::kBackward);
  EXPECT_TRUE(equal(emulated(two), of_two)) << "another order of threads and blocks";
  device::set_order(device::Order::kForward);
  for (int64_t largest : {1, 3}) {
    device::set_largest_grid(largest);
    EXPECT_TRUE(equal(emulated(two), of_two)) << "a grid of " << largest;
  }
  device::set_largest_grid(INT64_MAX);

  for (auto& t : tensors) {
    if (t) t = t->narrow(0, 1, 1);
  }
  // Incoming gradients are drawn for each shape: only the forward is compared.
  torch::NoGradGuard no_grad;
  const auto alone = qkv::InternalOp<qkv::Forward>("qkv::_attention_forward")(two.with(tensors),
                                                                              /*needs_rest=*/true);
  EXPECT_TRUE(torch::equal(std::get<0>(alone), of_two.out.narrow(0, 1, 1)));
  EXPECT_TRUE(torch::equal(std::get<1>(alone), of_two.lse.narrow(0, 1, 1)));
  expect_no_faults();
}

TEST(Emulated, WhatIsMaskedOutCannotMatter) {
  qkv::Operands x = large(1, 70, 139, 9, 11);
  x.key_mask = torch::ones({1, 139}, torch::kBool);
  x.key_mask->slice(1, 60, 80).fill_(false);
  x.attn_mask->slice(2, 30, 34).fill_(-INFINITY);  // rows that keep nothing
  const Results clean = emulated(x);
  const double poisons[] = {NAN, INFINITY, -INFINITY};
  for (double poison : poisons) {
    qkv::Operands y = x;
    y.key = x.key.clone();
    y.key.slice(2, 60, 80).fill_(poison);
    y.value = x.value.clone();
    y.value.slice(2, 60, 80).fill_(poison);
    y.query = x.query.clone();
    y.query.slice(2, 30, 34).fill_(poison);
    const Results dirty = emulated(y);
    EXPECT_TRUE(equal(dirty, clean)) << poison;
    for (size_t i = 3; i < 6; ++i) EXPECT_TRUE(torch::equal(dirty.grads[i], clean.grads[i])) << i;
  }
  expect_no_faults();
}

/// Of the incoming gradients only that of the row without keys does not matter to the sink, also if
/// the sink leaves keys a weight that rounding takes from the sum.
TEST(Emulated, ValuesOfZerosAreNotRowsWithoutKeys) {
  const int64_t sizes[][2] = {{3, 3}, {3, 1100}, {20, 70}};  // few rows, several ranges, tiles
  for (const auto& [rows, keys] : sizes) {
    const Tensor query = torch::randn({1, 1, rows, 4}), key = torch::randn({1, 1, keys, 4});
    const Tensor value = torch::zeros({1, 1, keys, 4});
    const Tensor keep = torch::ones({rows, keys}, torch::kBool);
    keep[1].fill_(false);
    for (const double sink : {0.0, 40.0}) {
      for (int64_t row = 0; row < 3; ++row) {
        const Tensor sinks = torch::full({1}, sink).requires_grad_();
        const Tensor grad = torch::zeros({1, 1, rows, 4});
        grad.select(2, row).fill_(NAN);
        const auto options = qkv::AttentionOptions().attn_mask(keep).sinks(sinks);
        const auto grads =
            torch::autograd::grad({qkv::attention(query, key, value, options)}, {sinks}, {grad});
        EXPECT_EQ(grads[0].isnan().item<bool>(), row != 1)
            << "row " << row << " of " << rows << " x " << keys << ", sink " << sink;
      }
    }
  }
  expect_no_faults();
}

TEST(Emulated, ASinkOfNanDoesNotReachRowsWithoutKeys) {
  const int64_t sizes[][2] = {{3, 3}, {3, 1100}, {20, 70}};  // few rows, several ranges, tiles
  for (const auto& [rows, keys] : sizes) {
    const Tensor query = torch::randn({1, 1, rows, 4});
    const Tensor key = torch::randn({1, 1, keys, 4}), value = torch::randn({1, 1, keys, 4});
    const Tensor keep = torch::ones({rows, keys}, torch::kBool);
    keep[1].fill_(false);
    const auto options = qkv::AttentionOptions().attn_mask(keep).sinks(torch::full({1}, NAN));
    const Tensor out = qkv::attention(query, key, value, options);
    EXPECT_TRUE(out.select(2, 1).eq(0).all().item<bool>());
    EXPECT_TRUE(out.select(2, 0).isnan().all().item<bool>());
  }
  expect_no_faults();
}

/// Long sums: over keys that the forward does not cut into ranges, as rows are many, and over rows.
TEST(Emulated, ErrorsDoNotGrowWithLength) {
  const int64_t sizes[][2] = {{2112, 2048}, {32768, 64}};
  for (const auto& [rows, keys] : sizes) {
    torch::manual_seed(6);
    const Tensor query = torch::randn({1, rows, 1}), key = torch::randn({1, keys, 1}),
                 value = torch::rand({1, keys, 1}), incoming = torch::rand({1, rows, 1});
    const auto results = [&](torch::ScalarType type, auto attention) {
      const Tensor k = key.to(type).detach().requires_grad_();
      const Tensor v = value.to(type).detach().requires_grad_();
      const Tensor out = attention(query.to(type), k, v);
      auto all = torch::autograd::grad({out}, {k, v}, {incoming.to(type)});
      all.push_back(out.detach());
      return all;
    };
    const auto wanted = results(torch::kDouble, [](const auto& q, const auto& k, const auto& v) {
      return torch::matmul(torch::softmax(torch::matmul(q, k.mT()), -1), v);
    });
    const auto found = results(torch::kFloat, [](const auto& q, const auto& k, const auto& v) {
      return qkv::attention(q, k, v);
    });
    const char* const names[] = {"gradient of key", "gradient of value", "out"};
    for (size_t i = 0; i < found.size(); ++i) {
      const Tensor error = (found[i] - wanted[i]).abs().max() / wanted[i].abs().max();
      EXPECT_LT(error.item<double>(), 1e-6) << names[i] << ", " << rows << " x " << keys;
    }
  }
  expect_no_faults();
}

/// Few rows take a kernel that sums scores in another order; those of 1e6 are 1/16 apart.
TEST(Emulated, WeightsOfDerivativesAddUp) {
  for (const int64_t rows : {1, 4, 16, 17}) {
    const Tensor query = torch::randn({1, rows, 64}) * 1e3, key = torch::randn({1, 700, 64}) * 1e3,
                 value = torch::zeros({1, 700, 2}).requires_grad_(),
                 incoming = torch::ones({1, rows, 2}).requires_grad_();
    const auto grad =
        torch::autograd::grad({qkv::attention(query, key, value)}, {value}, {incoming},
                              /*retain_graph=*/true, /*create_graph=*/true)[0];
    EXPECT_TRUE(torch::allclose(grad.sum(1), incoming.sum(1))) << rows;
    const auto of_incoming = torch::autograd::grad({grad.sum()}, {incoming})[0];
    EXPECT_TRUE(torch::allclose(of_incoming, torch::ones_like(incoming))) << rows;
  }
  expect_no_faults();
}

/// The same numbers in rows that are not aligned.
Tensor with_odd_rows(const Tensor& x) {
  auto sizes = x.sizes().vec();
  ++sizes.back();
  return torch::zeros(sizes, x.options()).slice(-1, 1).copy_(x);
}

/// Where rows are aligned, few rows take 16 bytes of them at once, else number by number.
TEST(Emulated, FewRowsReadPiecesAndNumbersAlike) {
  for (const auto type : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    for (const int64_t rows : {1, 3, 8}) {
      torch::manual_seed(7);
      const Tensor query = torch::randn({2, rows, 72}).to(type),
                   key = torch::randn({2, 1100, 72}).to(type),
                   value = torch::randn({2, 1100, 40}).to(type);
      const Tensor found = qkv::attention(query, key, value);
      EXPECT_TRUE(found.equal(qkv::attention(query, with_odd_rows(key), with_odd_rows(value))))
          << type << ", " << rows;
      const Tensor scores = torch::matmul(query.to(torch::kDouble), key.to(torch::kDouble).mT());
      const Tensor wanted =
          torch::matmul(torch::softmax(scores / std::sqrt(72.0), -1), value.to(torch::kDouble));
      EXPECT_TRUE(torch::allclose(found.to(torch::kDouble), wanted, 1e-2, 1e-3))
          << type << ", " << rows;
    }
  }
  expect_no_faults();
}

/// So do tiles, whether queries stay in shared memory, as on large devices, or do not.
TEST(Emulated, TilesReadPiecesAndNumbersAlike) {
  for (const auto type : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    torch::manual_seed(8);
    qkv::Operands x;
    x.query = torch::randn({1, 2, 70, 40}).to(type);
    x.key = torch::randn({1, 2, 100, 40}).to(type);
    x.value = torch::randn({1, 2, 100, 72}).to(type);
    x.band = {-1, -1, 0};
    device::set_bytes_of_multiprocessor(64 << 10);
    const Results in_pieces = emulated(x);
    qkv::Operands odd = x;
    for (Tensor* operand : {&odd.query, &odd.key, &odd.value}) *operand = with_odd_rows(*operand);
    EXPECT_TRUE(equal(emulated(odd), in_pieces)) << type;
    device::set_bytes_of_multiprocessor(228 << 10);
    EXPECT_TRUE(equal(emulated(x), in_pieces)) << type;
    EXPECT_TRUE(equal(emulated(odd), in_pieces)) << type;
    device::set_bytes_of_multiprocessor(device::kBytesOfMultiprocessor);
  }
  expect_no_faults();
}

/// Rows whose windows begin after the last key: a whole tile of them, and few.
TEST(Emulated, TilesOfRowsWithoutKeys) {
  qkv::Operands x = large(1, 130, 10, 8, 8);
  x.band = {2, 0, 0};
  check(x, torch::kFloat);
  x = large(1, 3, 5, 8, 8);
  x.band = {1, 0, 10};
  check(x, torch::kFloat);
}

TEST(Emulated, AKeptNanIsSeenAmongWeightsOfZero) {
  for (const int64_t rows : {1, 130}) {
    const Tensor query = torch::full({1, rows, 1}, 1e20), key = torch::full({1, 2100, 1}, -1e20),
                 value = torch::zeros({1, 2100, 1});
    key.slice(1, 0, 300).zero_();  // of a range of keys all scores are -inf, and none masked out
    value[0][2099] = NAN;
    EXPECT_TRUE(qkv::attention(query, key, value, qkv::AttentionOptions().scale(1.0))
                    .isnan()
                    .all()
                    .item<bool>())
        << rows;
  }
  expect_no_faults();
}

TEST(Emulated, ScoresOfAnySizeAreFinite) {
  qkv::Operands x = large(1, 5, 70, 4, 3);
  x.softcap = 0.0;
  x.query.mul_(1e4);
  x.key.mul_(1e4);
  const Results found = emulated(converted(x, torch::kFloat));
  EXPECT_TRUE(found.out.isfinite().all().item<bool>());
  for (const Tensor& grad : found.grads) EXPECT_TRUE(grad.isfinite().all().item<bool>());
  expect_no_faults();
}

}  // namespace
