// Several C++ threads call the operator and its backward at once, each with other options: the bits
// are those of one call after the other. (One problem from several threads: test_invariance.cpp.)

#include <gtest/gtest.h>
#include <qkv/qkv.h>
#include <torch/torch.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <thread>

#include "cpu/waves.h"
#include "samples.h"

namespace {

using torch::Tensor;
using Results = std::vector<Tensor>;

/// Calls all of them at the same time, so that also what is done only once in a process (choosing
/// an instruction set, say) is done by whoever comes first.
std::vector<Results> at_once(const std::vector<std::function<Results()>>& calls) {
  std::vector<Results> results(calls.size());
  std::barrier start(static_cast<std::ptrdiff_t>(calls.size()));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < calls.size(); ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      for (int again = 0; again < 3; ++again) results[i] = calls[i]();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

void expect_the_bits_of_one_after_the_other(const std::vector<std::function<Results()>>& calls) {
  const std::vector<Results> found = at_once(calls);
  for (size_t i = 0; i < calls.size(); ++i) {
    const Results expected = calls[i]();
    ASSERT_EQ(found[i].size(), expected.size());
    for (size_t j = 0; j < expected.size(); ++j) {
      EXPECT_TRUE(torch::equal(found[i][j], expected[j])) << "call " << i << ", result " << j;
    }
  }
}

/// Output, logsumexp and gradients.
Results forward_and_backward(const samples::Sample& sample) {
  std::vector<Tensor> leaves;
  const auto leaf = [&](const Tensor& x) {
    return leaves.emplace_back(x.detach().clone().requires_grad_());
  };
  const Tensor q = leaf(sample.query), k = leaf(sample.key), v = leaf(sample.value);
  auto options = sample.options;
  if (options.attn_mask() && options.attn_mask()->is_floating_point()) {
    options.attn_mask(leaf(*options.attn_mask()));
  }
  if (options.alibi_slopes()) options.alibi_slopes(leaf(*options.alibi_slopes()));
  if (options.sinks()) options.sinks(leaf(*options.sinks()));
  const auto [out, lse] = qkv::attention_with_lse(q, k, v, options);
  Results results = torch::autograd::grad({out.sin().sum()}, leaves);
  results.push_back(out.detach());
  results.push_back(lse.detach());
  return results;
}

TEST(Threads, EachWithOtherOptions) {
  std::vector<std::function<Results()>> calls;
  for (const samples::Sample& sample : samples::small()) {
    // Seeds are drawn from the one generator of the device, in whatever order threads come.
    if (sample.options.dropout_p() > 0.0) continue;
    calls.emplace_back([sample] { return forward_and_backward(sample); });
  }
  ASSERT_GT(calls.size(), 40u);
  expect_the_bits_of_one_after_the_other(calls);
}

/// However many small sums there are, no thread keeps for itself what fills a wave: here both parts
/// of one wait for each other.
TEST(Threads, FillEachWaveTogether) {
  constexpr int64_t kWaves = 4, kFills = 2, kSums = 400;
  const int before = at::get_num_threads();
  at::set_num_threads(kFills);
  qkv::cpu::Waves waves(/*in_order=*/false);
  for (int64_t w = 0; w < kWaves; ++w) waves.add(kFills, kSums);
  std::atomic<int64_t> begun[kWaves] = {}, alone{0}, summed{0};
  qkv::cpu::Workspace workspace;
  waves.run(
      0, workspace,
      [&](int64_t wave, int64_t, void*) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
        ++begun[wave];
        while (begun[wave] < kFills && std::chrono::steady_clock::now() < end) {
          std::this_thread::yield();
        }
        if (begun[wave] < kFills) ++alone;
      },
      [&](int64_t, int64_t, void*) { ++summed; });
  at::set_num_threads(before);
  EXPECT_EQ(alone, 0);
  EXPECT_EQ(summed, kWaves * kSums);
}

/// Grad mode, inference mode and autocast belong to a thread.
TEST(Threads, EachWithAnotherMode) {
  const Tensor x = torch::randn({2, 4, 70, 16});
  const auto attend = [x] {
    return qkv::attention(x, x, x, qkv::AttentionOptions().is_causal(true));
  };
  expect_the_bits_of_one_after_the_other({
      [=] { return Results{attend()}; },
      [=] {
        c10::InferenceMode guard;
        return Results{attend()};
      },
      [=] {
        torch::NoGradGuard guard;
        return Results{attend()};
      },
      [=] {
        const Tensor leaf = x.detach().clone().requires_grad_();
        return torch::autograd::grad({qkv::attention(leaf, leaf, leaf).sum()}, {leaf});
      },
  });
}

TEST(Threads, OneModule) {
  qkv::nn::MultiheadAttention module(qkv::nn::MultiheadAttentionOptions(16, 4).causal(true));
  std::vector<std::function<Results()>> calls;
  for (int64_t length : {1, 3, 9, 70}) {
    const Tensor x = torch::randn({2, length, 16});
    calls.emplace_back([module, x]() mutable {
      const Tensor out = module->forward(x);
      Results results = torch::autograd::grad({out.sin().sum()}, module->parameters());
      results.push_back(out.detach());
      return results;
    });
  }
  expect_the_bits_of_one_after_the_other(calls);
}

}  // namespace
