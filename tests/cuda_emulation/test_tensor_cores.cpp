// The kernels for tensor cores on the emulated device: against the definition in float64, bit by
// bit against themselves whatever runs first, and what they must not read.

#include <gtest/gtest.h>
#include <qkv/qkv.h>

#include "cuda_emulation/operators.h"
#include "cuda_emulation/tensor_cores.h"
#include "reference.h"

namespace {

using namespace emulation;

class TensorCores : public ::testing::Test {
  void SetUp() override {
    device::set_tensor_cores(true);
    device::set_bytes_of_multiprocessor(228 << 10);  // as sm_90 has them
  }
  void TearDown() override {
    device::set_bytes_of_multiprocessor(device::kBytesOfMultiprocessor);
    device::set_tensor_cores(false);
    expect_no_faults();
  }
};

struct Forward {
  Tensor out, lse, out_rest;

  explicit Forward(const qkv::Operands& x, bool needs_rest = true) {
    torch::NoGradGuard no_grad;
    std::tie(out, lse, out_rest, std::ignore) =
        qkv::InternalOp<qkv::Forward>("qkv::_attention_forward")(x, needs_rest);
  }
};

/// Without options, unless they are set afterwards.
qkv::Operands plain(int64_t rows, int64_t keys, int64_t width, int64_t value_width) {
  qkv::Operands x = large(1, rows, keys, width, value_width);
  x.attn_mask = x.alibi_slopes = x.sinks = x.key_mask = x.dropout_seed = std::nullopt;
  x.softcap = x.dropout_p = 0.0;
  x.band = {-1, -1, 0};
  return x;
}

/// A causal mask, all options, splits, and several blocks of columns: one and two row tiles of a
/// warp, and more rows than a tile has; head dims that are a product's steps, or pieces, or
/// neither.
std::vector<qkv::Operands> problems() {
  return {plain_tiles()[1], large(1), large(1, 20, 1100, 8, 200), plain(17, 128, 200, 256)};
}

std::vector<qkv::Operands> more_problems() {
  std::vector<qkv::Operands> all = problems();
  all.push_back(plain_tiles()[0]);
  all.push_back(plain(150, 139, 70, 133));
  all.push_back(large(2, 65, 192, 64, 64));
  all.push_back(plain(20, 1100, 40, 24));
  all.push_back(plain(90, 256, 96, 64));
  all.back().band = {40, 0, 100};
  all.back().attn_mask = (torch::rand({90, 256}) < 0.8).expand({1, 4, 90, 256});
  return all;
}

double error(const Tensor& x, const Tensor& wanted) {
  const Tensor difference = x.to(torch::kDouble) - wanted;
  return (difference.norm() / wanted.norm()).item<double>();
}

TEST_F(TensorCores, EqualTheDefinition) {
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    for (const auto& of_doubles : more_problems()) {
      const qkv::Operands x = converted(of_doubles, type);
      const std::string what = c10::str(type, ' ', x.query.sizes(), ' ', x.value.sizes());
      device::take_launches();
      const Forward found(x);
      EXPECT_EQ(device::take_launches()[0], "attention_forward_sm80");
      const auto [out, lse] = qkv::reference::attention(converted(x, torch::kDouble));
      // As FlashAttention's: at most twice the error of PyTorch's operations in this type.
      const auto [usual, usual_lse] = qkv::reference::attention(x);
      EXPECT_LE(error(found.out, out), 2.0 * error(usual, out)) << what;
      EXPECT_TRUE(torch::allclose(found.lse.to(torch::kDouble), lse, 1e-6, 1e-5)) << what;
      // Without the rounding of the output, what weights lost to theirs is left.
      const Tensor whole = found.out.to(torch::kDouble) + found.out_rest.to(torch::kDouble);
      EXPECT_LT(error(whole, out), 0.8 * error(found.out, out)) << what;
    }
  }
}

/// out and lse, and the gradients of all operands along what a sample is differentiated along.
template <class Attention>
std::vector<Tensor> results(const qkv::Operands& x, const Incoming& incoming,
                            const Attention& attention) {
  auto tensors = x.tensors();
  std::vector<Tensor> leaves;
  for (auto& t : tensors) {
    if (is_number(t)) leaves.push_back(*(t = t->detach().requires_grad_()));
  }
  const auto [out, lse] = attention(x.with(tensors));
  auto all = torch::autograd::grad(
      {out, lse}, leaves, {incoming.out.to(out.scalar_type()), incoming.lse.to(lse.scalar_type())});
  all.push_back(out.detach());
  return all;
}

/// Whether tensor cores or other kernels run: problems of few rows, splits and tiles.
TEST_F(TensorCores, RestsChangeNoOutput) {
  for (const bool is_on : {true, false}) {
    device::set_tensor_cores(is_on);
    for (const auto type : {torch::kBFloat16, torch::kHalf}) {
      for (const auto& of_doubles : problems()) {
        const qkv::Operands x = converted(of_doubles, type);
        const Forward with(x), without(x, /*needs_rest=*/false);
        EXPECT_EQ(with.out_rest.sizes(), with.out.sizes());
        EXPECT_EQ(without.out_rest.numel(), 0);
        EXPECT_TRUE(with.out.equal(without.out));
        EXPECT_TRUE(with.lse.equal(without.lse));
      }
    }
  }
}

std::tuple<Tensor, Tensor> forward(const qkv::Operands& x) {
  const auto all = qkv::InternalOp<qkv::Forward>("qkv::_attention_forward")(x, /*needs_rest=*/true);
  return {std::get<0>(all), std::get<1>(all)};
}

std::vector<Tensor> results(const qkv::Operands& x) { return results(x, Incoming(x), forward); }

/// Little more is lost than by one rounding of what is exact.
TEST_F(TensorCores, GradientsAreRoundedOnce) {
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    for (const auto& of_doubles : type == torch::kHalf ? problems() : more_problems()) {
      const qkv::Operands x = converted(of_doubles, type);
      device::take_launches();
      const auto found = results(x);
      const auto launches = device::take_launches();
      for (const char* kernel : {"grad_query_sm80", "grad_key_sm80"}) {
        EXPECT_EQ(std::count(launches.begin(), launches.end(), kernel), 1) << kernel;
      }
      const auto reference = [](const qkv::Operands& y) { return qkv::reference::attention(y); };
      const auto wanted = results(converted(x, torch::kDouble), Incoming(x), reference);
      const auto usual = results(x, Incoming(x), reference);
      for (size_t i = 0; i < found.size() - 1; ++i) {
        // Those of slopes and sinks see what weights of the output lost, in sums that cancel.
        const double allowed =
            i < 4 ? 1.25 * error(wanted[i].to(type), wanted[i]) : 3.0 * error(usual[i], wanted[i]);
        EXPECT_LE(error(found[i], wanted[i]), allowed + 1e-6)
            << type << ' ' << x.query.sizes() << ' ' << x.value.sizes() << ", gradient " << i;
      }
    }
  }
}

bool equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return x.equal(y); });
}

TEST_F(TensorCores, BitsDoNotDependOnWhatRunsFirstOrOnTheSizeOfTheDevice) {
  std::vector<qkv::Operands> all;
  for (const auto& x : problems()) all.push_back(converted(x, torch::kBFloat16));
  all.push_back(converted(problems()[1], torch::kHalf));
  for (const auto& x : all) {
    const auto usual = results(x);
    const std::string what = c10::str(x.query.sizes(), ' ', x.value.sizes());
    device::set_copies(device::Copies::kWhenWaitedFor);
    device::set_order(device::Order::kBackward);
    EXPECT_TRUE(equal(results(x), usual))
        << "copies at the last moment, another order of threads and blocks, " << what;
    // One row tile for each warp of the forward, and one stage in the backward.
    device::set_multiprocessors(1000);
    device::set_bytes_of_multiprocessor(150 << 10);
    EXPECT_TRUE(equal(results(x), usual)) << "other tiles, " << what;
    device::set_copies(device::Copies::kAtOnce);
    device::set_largest_grid(1);
    EXPECT_TRUE(equal(results(x), usual)) << "a grid of one block, " << what;
    device::set_largest_grid(INT64_MAX);
    device::set_multiprocessors(1);
    device::set_bytes_of_multiprocessor(228 << 10);
    device::set_order(device::Order::kForward);
  }
}

TEST_F(TensorCores, PiecesAndNumbersAreReadAlike) {
  const auto with_odd_rows = [](const Tensor& x) {
    auto sizes = x.sizes().vec();
    ++sizes.back();
    return torch::zeros(sizes, x.options()).slice(-1, 1).copy_(x);
  };
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    const qkv::Operands x = converted(plain(70, 150, 40, 72), type);
    qkv::Operands odd = x;
    for (Tensor* operand : {&odd.query, &odd.key, &odd.value}) *operand = with_odd_rows(*operand);
    EXPECT_TRUE(equal(results(odd), results(x))) << type;
  }
}

TEST_F(TensorCores, WhatIsMaskedOutCannotMatter) {
  const std::pair<torch::ScalarType, int64_t> kinds[] = {
      {torch::kBFloat16, 40}, {torch::kBFloat16, 100}, {torch::kHalf, 40}};
  for (const auto& [type, width] : kinds) {
    qkv::Operands x = large(1, 70, 200, width, width);
    x.key_mask = torch::ones({1, 200}, torch::kBool);
    x.key_mask->slice(1, 60, 80).fill_(false);
    x.attn_mask->slice(2, 30, 34).fill_(-INFINITY);  // rows that keep nothing
    const auto clean = results(converted(x, type));
    EXPECT_EQ(clean.back().slice(2, 30, 34).count_nonzero().item<int64_t>(), 0);
    int64_t step = 0;
    for (const double poison : {(double)NAN, (double)INFINITY, -(double)INFINITY}) {
      for (Tensor* operand : {&x.key, &x.value}) {
        *operand = operand->clone();
        operand->slice(2, 60 + step, 80, 3).fill_(poison);
      }
      x.query = x.query.clone();
      x.query.slice(2, 30 + step, 34, 3).fill_(poison);
      ++step;
    }
    EXPECT_TRUE(equal(results(converted(x, type)), clean)) << type << ' ' << width;
  }
}

/// Causal: the rows from the key's position on, in the value's own column.
TEST_F(TensorCores, AKeptNanIsSeenInItsColumnOnly) {
  for (const double poison : {(double)NAN, (double)INFINITY}) {
    qkv::Operands x = plain(150, 150, 64, 64);
    x.band = {-1, 0, 0};
    const Forward clean(converted(x, torch::kBFloat16));
    x.value.select(2, 70).select(-1, 5).fill_(poison);
    const Forward found(converted(x, torch::kBFloat16));
    const Tensor finite = found.out.isfinite();
    EXPECT_FALSE(finite.slice(2, 70).select(-1, 5).any().item<bool>());
    Tensor rest = finite.clone();
    rest.slice(2, 70).select(-1, 5).fill_(true);
    EXPECT_TRUE(rest.all().item<bool>());
    EXPECT_TRUE(found.out.masked_select(finite).equal(clean.out.masked_select(finite)));
  }
}

/// dS of 1e6 and of 1e-7, where the gradients have the range of float16.
TEST_F(TensorCores, GradientsOfFloat16HaveTheRangeOfFloat32Within) {
  struct Sizes {
    double query, key, value, grad_out;
  };
  for (const auto& sizes : {Sizes{1e-3, 1e-3, 1e4, 1e3}, Sizes{1e-3, 1e3, 0.1, 1e-3}}) {
    qkv::Operands of_doubles = plain(70, 200, 64, 64);
    of_doubles.query.mul_(sizes.query);
    of_doubles.key.mul_(sizes.key);
    of_doubles.value.mul_(sizes.value);
    const qkv::Operands x = converted(of_doubles, torch::kHalf);
    auto incoming = Incoming(x);
    incoming.out = incoming.out.mul(sizes.grad_out).to(torch::kHalf).to(torch::kDouble);
    incoming.lse.zero_();
    const auto found = results(x, incoming, forward);
    const auto reference = [](const qkv::Operands& y) { return qkv::reference::attention(y); };
    const auto wanted = results(converted(x, torch::kDouble), incoming, reference);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_LE(error(found[i], wanted[i]), 1.25 * error(wanted[i].to(torch::kHalf), wanted[i]))
          << sizes.key << ", gradient " << i;
    }
  }
}

/// Of one sign and 16384 others: sums that products cut off, each by a little, are taken in groups.
TEST_F(TensorCores, ErrorsOfLongGradientsDoNotGrow) {
  const auto check = [](qkv::Operands x, int64_t heads, const std::vector<size_t>& which) {
    x.query = x.query.narrow(1, 0, heads);
    x.key = x.value = x.key.narrow(1, 0, 1);  // so that sums for the query do not cancel
    const auto gradients = [&](torch::ScalarType type, const auto& attention) {
      qkv::Operands y = converted(x, torch::kHalf);
      for (Tensor* operand : {&y.query, &y.key, &y.value}) *operand = operand->abs().to(type);
      const auto incoming = Incoming(y).out.abs().to(torch::kHalf).to(type);
      std::vector<Tensor> leaves;
      for (const size_t i : which) {
        leaves.push_back((i == 0 ? y.query : i == 1 ? y.key : y.value).requires_grad_());
      }
      return torch::autograd::grad({std::get<0>(attention(y))}, leaves, {incoming});
    };
    const auto reference = [](const qkv::Operands& y) { return qkv::reference::attention(y); };
    const auto found = gradients(torch::kHalf, forward);
    const auto wanted = gradients(torch::kDouble, reference);
    for (size_t i = 0; i < which.size(); ++i) {
      EXPECT_LE(error(found[i], wanted[i]), 1.03 * error(wanted[i].to(torch::kHalf), wanted[i]))
          << "gradient " << which[i];
    }
  };
  check(plain(17, 16384, 16, 16), 1, {0});
  check(plain(8192, 128, 16, 16), 2, {1, 2});
}

/// Gradients that come for rows reach the keys that these keep, and no other.
TEST_F(TensorCores, AnIncomingNanReachesWhatItsRowKeeps) {
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    const qkv::Operands x = converted(plain(100, 150, 64, 64), type);
    qkv::Operands causal = x;
    causal.band = {-1, 0, 0};
    auto incoming = Incoming(x);
    const auto gradients = [&] { return results(causal, incoming, forward); };
    const auto clean = gradients();
    incoming.out.select(2, 70).select(-1, 5).fill_(NAN);
    const auto found = gradients();
    for (size_t i = 0; i < 3; ++i) {
      const int64_t begin = i == 0 ? 70 : 0, end = 71;
      Tensor reached = found[i].slice(2, begin, end), rest = found[i].clone();
      if (i == 2) reached = reached.select(-1, 5);
      EXPECT_TRUE(reached.isnan().all().item<bool>()) << i;
      const Tensor same = found[i].isfinite();
      EXPECT_TRUE(found[i].masked_select(same).equal(clean[i].masked_select(same))) << i;
      EXPECT_EQ(same.logical_not().count_nonzero().item<int64_t>(), reached.numel()) << i;
    }
  }
}

TEST_F(TensorCores, ScoresAndMasksOfAnySizeAreFinite) {
  qkv::Operands x = plain(40, 200, 16, 16);
  x.query.mul_(1e4);
  x.key.mul_(1e4);
  EXPECT_TRUE(Forward(converted(x, torch::kBFloat16)).out.isfinite().all().item<bool>());

  x = converted(plain(40, 200, 16, 16), torch::kBFloat16);
  x.attn_mask =
      torch::full({1, 1, 1, 1}, std::numeric_limits<float>::lowest()).expand({1, 4, 40, 200});
  const Tensor mean = x.value.to(torch::kDouble).mean(2, true).repeat_interleave(2, 1);
  EXPECT_TRUE(
      torch::allclose(Forward(x).out.to(torch::kDouble), mean.expand({1, 4, 40, 16}), 0.0, 1e-2));
}

TEST_F(TensorCores, ALargeSoftcapMakesNoDifference) {
  qkv::Operands x = converted(plain(40, 200, 32, 16), torch::kBFloat16);
  const Forward without(x);
  for (const double softcap : {1e5, 1e20}) {
    x.softcap = softcap;
    EXPECT_TRUE(torch::allclose(Forward(x).lse, without.lse, 1e-6, 1e-6)) << softcap;
  }
}

/// Of rows so many that their keys are not split.
TEST_F(TensorCores, ErrorsOfLongSumsDoNotGrow) {
  qkv::Operands x = plain(1025, 4096, 16, 16);
  for (Tensor* operand : {&x.query, &x.key, &x.value}) *operand = operand->narrow(1, 0, 1);
  x.query.fill_(-1.0);
  x.key.fill_(0.25);
  x.key.select(2, 0).zero_();  // its weight is 1, all others are e^-1
  const double lse = std::log(1.0 + 4095.0 * std::exp(-1.0));
  EXPECT_LT((Forward(converted(x, torch::kBFloat16)).lse - lse).abs().max().item<double>(), 3e-6);
}

/// Whatever weights lose by rounding, what all values have in common stays.
TEST_F(TensorCores, OutputsAreConvexCombinations) {
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    for (qkv::Operands x : {plain(70, 150, 40, 72), plain(20, 1100, 40, 24)}) {  // and splits
      x.query = 3.0 * x.query;
      x.value = torch::ones_like(x.value);
      const Forward found(converted(x, type));
      const Tensor whole = found.out.to(torch::kDouble) + found.out_rest.to(torch::kDouble);
      EXPECT_LT((whole - 1.0).abs().max().item<double>(), 2e-6) << type << x.query.sizes();
    }
  }
}

/// Else the kernels for any device do.
TEST_F(TensorCores, TakeWhatTheyCan) {
  const auto first_kernel = [](const qkv::Operands& x, torch::ScalarType type) {
    device::take_launches();
    Forward{converted(x, type)};
    return device::take_launches()[0];
  };
  EXPECT_EQ(first_kernel(plain(17, 128, 8, 8), torch::kHalf), "attention_forward_sm80");
  EXPECT_EQ(first_kernel(plain(17, 127, 8, 8), torch::kHalf), "attention_forward");
  EXPECT_EQ(first_kernel(plain(8, 128, 8, 8), torch::kHalf), "few_rows");
  EXPECT_EQ(first_kernel(plain(17, 128, 257, 8), torch::kHalf), "attention_forward");
  EXPECT_EQ(first_kernel(plain(17, 128, 8, 8), torch::kFloat), "attention_forward");
  EXPECT_EQ(first_kernel(plain(17, 128, 0, 8), torch::kHalf), "attention_forward");
  device::set_bytes_of_multiprocessor(99 << 10);  // as sm_86 and sm_89 have them
  EXPECT_EQ(first_kernel(plain(150, 128, 256, 72), torch::kHalf), "attention_forward_sm80");
  device::set_tensor_cores(false);
  EXPECT_EQ(first_kernel(plain(17, 128, 8, 8), torch::kHalf), "attention_forward");
}

}  // namespace
