// Bits of one (batch, head) do not depend on threads, on the rest of the batch, on where operands
// lie, or on who else is calling.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <qkv/qkv.h>
#include <torch/torch.h>

#include <cfenv>
#include <thread>

namespace {

using torch::Tensor;

struct Results {
  std::vector<Tensor> tensors;  // gradients, output, logsumexp, second gradients

  bool operator==(const Results& other) const {
    if (tensors.size() != other.tensors.size()) return false;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!torch::equal(tensors[i], other.tensors[i])) return false;
    }
    return true;
  }
};

/// Keys enough for several splits in the backward.
struct Problem {
  Tensor query = torch::randn({2, 4, 150, 24}), key = torch::randn({2, 2, 1300, 24}),
         value = torch::randn({2, 2, 1300, 17}), grad = torch::randn({2, 4, 150, 17}),
         mask = torch::randn({150, 1300}), slopes = torch::rand({4}), sinks = torch::randn({4});
  double dropout_p = 0.0;

  Results run(at::indexing::Slice batch = {}) const {
    const auto leaf = [](const Tensor& x) { return x.detach().clone().requires_grad_(); };
    const Tensor q = leaf(query.index({batch})), k = leaf(key.index({batch})),
                 v = leaf(value.index({batch})), m = leaf(mask), a = leaf(slopes), s = leaf(sinks);
    const auto options = qkv::AttentionOptions()
                             .enable_gqa(true)
                             .is_causal(true)
                             .query_offset(1150)
                             .attn_mask(m)
                             .softcap(3.0)
                             .alibi_slopes(a)
                             .sinks(s)
                             .dropout_p(dropout_p);
    if (dropout_p > 0.0) torch::manual_seed(1);
    const auto [out, lse] = qkv::attention_with_lse(q, k, v, options);
    const Tensor incoming = leaf(grad.index({batch}));
    const std::vector<Tensor> inputs = {q, k, v, m, a, s};
    const auto grads = torch::autograd::grad({out}, inputs, {incoming}, /*retain_graph=*/true,
                                             /*create_graph=*/true);
    Results r;
    for (const Tensor& x : grads) r.tensors.push_back(x.detach());
    r.tensors.push_back(out.detach());
    r.tensors.push_back(lse.detach());
    // The first of these is the output's derivative, as in forward mode.
    std::vector<Tensor> cotangents;
    for (const Tensor& x : inputs) cotangents.push_back(x.detach().cos());
    for (const Tensor& x : torch::autograd::grad(grads, {incoming, q, k, v, m, a, s}, cotangents)) {
      r.tensors.push_back(x);
    }
    return r;
  }
};

TEST(Invariance, NumberOfThreads) {
  Problem problem;
  problem.dropout_p = 0.2;
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const Results expected = problem.run();
  for (int threads : {2, 3, 5, 16}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(problem.run() == expected) << threads << " threads";
  }
  at::set_num_threads(before);
}

/// Blocks of keys are splits then, for several threads if there is one head, for one if there are
/// several. One that adds to a sum what it would leave by itself must round as often.
TEST(Invariance, BackwardOfFewKeys) {
  const int before = at::get_num_threads();
  for (const int64_t keys : {100, 128, 197, 300, 500, 768}) {
    for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kFloat64}) {
      for (const bool is_causal : {false, true}) {
        const auto of = [&](int64_t rows) { return torch::randn({3, 1, rows, 32}).to(dtype); };
        const std::vector<Tensor> inputs = {of(keys), of(keys), of(keys), of(keys)};
        const auto gradients = [&](const at::indexing::Slice& batch) {
          std::vector<Tensor> x;
          for (const Tensor& input : inputs) x.push_back(input.index({batch}).requires_grad_());
          const auto options = qkv::AttentionOptions().is_causal(is_causal);
          const Tensor out = qkv::attention(x[0], x[1], x[2], options);
          return Results{torch::autograd::grad({out}, {x[0], x[1], x[2]}, {x[3]})};
        };
        at::set_num_threads(1);
        const Results expected = gradients({});
        for (const int threads : {1, 2, 3, 4, 16}) {
          at::set_num_threads(threads);
          Results of_last = expected;
          for (Tensor& x : of_last.tensors) x = x.slice(0, 2);
          EXPECT_TRUE(gradients({2, 3}) == of_last)
              << keys << " keys, " << dtype << ", " << threads << " threads";
        }
      }
    }
  }
  at::set_num_threads(before);
}

/// Heads of 2, 4 and 8 rows, whose backward has a kernel of its own.
TEST(Invariance, BackwardOfFewRows) {
  const int before = at::get_num_threads();
  for (const int64_t queries : {1, 2, 4}) {
    const std::vector<Tensor> inputs = {
        torch::randn({2, 4, queries, 40}), torch::randn({2, 2, 1300, 40}),
        torch::randn({2, 2, 1300, 17}), torch::randn({2, 4, queries, 17}),
        torch::randn({2, 1, queries, 1300})};
    const auto gradients = [&](const at::indexing::Slice& batch) {
      std::vector<Tensor> x;
      for (const Tensor& input : inputs) {
        x.push_back(input.index({batch}).clone().requires_grad_());
      }
      auto options = qkv::AttentionOptions().enable_gqa(true).window(900, 0).query_offset(1250);
      const auto gradients_of = [&](const std::vector<Tensor>& of) {
        const Tensor out = qkv::attention(x[0], x[1], x[2], options);
        return torch::autograd::grad({out}, of, {x[3]});
      };
      Results results{gradients_of({x[0], x[1], x[2]})};
      options.attn_mask(x[4]);
      for (Tensor& grad : gradients_of({x[0], x[1], x[2], x[4]})) {
        results.tensors.push_back(std::move(grad));
      }
      return results;
    };
    at::set_num_threads(1);
    const Results expected = gradients({});
    for (int threads : {2, 3, 5, 16}) {
      at::set_num_threads(threads);
      EXPECT_TRUE(gradients({}) == expected) << threads << " threads";
      Results of_last = expected;
      for (Tensor& x : of_last.tensors) x = x.slice(0, 1);
      EXPECT_TRUE(gradients({1, 2}) == of_last) << threads << " threads";
    }
  }
  at::set_num_threads(before);
}

/// Of tiles of rows and of few rows. A thread makes dS of a tile in its own memory or finds it in
/// that of all.
TEST(Invariance, Weights) {
  const int before = at::get_num_threads();
  for (const int64_t queries : {1, 3, 20, 150}) {
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      const std::vector<Tensor> inputs = {
          torch::randn({2, 4, queries, 40}, dtype), torch::randn({2, 2, 1300, 40}, dtype),
          torch::randn({2, 1, queries, 1300}, dtype), torch::randn({2, 4, queries, 1300}, dtype)};
      const auto run = [&](const at::indexing::Slice& batch) {
        std::vector<Tensor> x;
        for (const Tensor& input : inputs) {
          x.push_back(input.index({batch}).clone().requires_grad_());
        }
        const auto options =
            qkv::AttentionOptions().enable_gqa(true).window(900, 0).query_offset(1100).attn_mask(
                x[2]);
        const Tensor weights = qkv::attention_weights(x[0], x[1], options);
        Results results{torch::autograd::grad({weights}, {x[0], x[1], x[2]}, {x[3]})};
        results.tensors.push_back(weights.detach());
        const auto all = qkv::AttentionOptions().enable_gqa(true);
        const auto of_all =
            torch::autograd::grad({qkv::attention_weights(x[0], x[1], all)}, {x[0], x[1]}, {x[3]});
        results.tensors.insert(results.tensors.end(), of_all.begin(), of_all.end());
        return results;
      };
      at::set_num_threads(1);
      const Results expected = run({});
      for (int threads : {2, 3, 5, 16}) {
        at::set_num_threads(threads);
        EXPECT_TRUE(run({}) == expected) << threads << " threads";
        Results of_last = expected;
        for (Tensor& x : of_last.tensors) x = x.slice(0, 1);
        EXPECT_TRUE(run({1, 2}) == of_last) << threads << " threads";
      }
    }
  }
  at::set_num_threads(before);
}

/// Whether splits add to the mask's gradient, and so how blocks at the edge of a causal mask are
/// cut, depends on the number of threads.
TEST(Invariance, WeightsOfFewKeys) {
  const int before = at::get_num_threads();
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
    const Tensor q = torch::randn({4, 300, 40}, dtype), k = torch::randn({4, 300, 40}, dtype),
                 grad = torch::randn({4, 300, 300}, dtype), mask = torch::randn({300, 300}, dtype);
    const auto run = [&](const at::indexing::Slice& heads) {
      const Tensor x = q.index({heads}).clone().requires_grad_(),
                   y = k.index({heads}).clone().requires_grad_(), z = mask.clone().requires_grad_();
      const auto options = qkv::AttentionOptions().is_causal(true).attn_mask(z);
      const Tensor weights = qkv::attention_weights(x, y, options);
      auto gradients = torch::autograd::grad({weights}, {x, y, z}, {grad.index({heads})});
      if (x.size(0) < q.size(0)) gradients.pop_back();  // a sum over other heads
      return Results{gradients};
    };
    at::set_num_threads(1);
    const Results expected = run({});
    for (int threads : {1, 2, 3, 5, 16}) {
      at::set_num_threads(threads);
      EXPECT_TRUE(run({}) == expected) << threads << " threads";
      Results of_last = expected;
      of_last.tensors.pop_back();
      for (Tensor& x : of_last.tensors) x = x.slice(0, 3);
      EXPECT_TRUE(run({3, 4}) == of_last) << threads << " threads";
    }
  }
  at::set_num_threads(before);
}

/// With few threads a unit of the backward takes several of the ranges that keys are cut into.
TEST(Invariance, BackwardOfManyKeys) {
  const int before = at::get_num_threads();
  const Tensor q = torch::randn({2, 300, 16}).requires_grad_(),
               k = torch::randn({2, 2700, 16}).requires_grad_(),
               v = torch::randn({2, 2700, 9}).requires_grad_(), grad = torch::randn({2, 300, 9});
  const qkv::AttentionOptions all, causal = qkv::AttentionOptions().window(-1, 0),
                                   window = qkv::AttentionOptions().window(700, 20);
  for (auto options : {all, causal, window}) {
    options.query_offset(2300);
    const auto gradients = [&] {
      const Tensor out = qkv::attention(q, k, v, options);
      return Results{torch::autograd::grad({out}, {q, k, v}, {grad})};
    };
    at::set_num_threads(1);
    const Results expected = gradients();
    for (int threads : {2, 3, 5, 16}) {
      at::set_num_threads(threads);
      EXPECT_TRUE(gradients() == expected) << threads << " threads";
    }
  }
  at::set_num_threads(before);
}

/// A flag of each thread, which those that help take over from the one that calls.
TEST(Invariance, SubnormalNumbersThatCountAsZeros) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  const Problem problem;
  problem.run();  // now there is a second thread
  const Tensor subnormal = torch::full({64, 300, 16}, 1e-40f), q = torch::zeros({64, 40, 16});
  const Tensor half =
      torch::full({2, 4, 13}, 3e-5, torch::kHalf);  // as float32 it is a normal number
  at::globalContext().setFlushDenormal(true);
  const Tensor flushed = qkv::attention(q, subnormal, subnormal);
  const Tensor kept = qkv::attention(torch::zeros_like(half), torch::zeros_like(half), half);
  at::globalContext().setFlushDenormal(false);
  EXPECT_EQ(flushed.count_nonzero().item<int64_t>(), 0);
  EXPECT_TRUE(torch::equal(kept, half));
  EXPECT_GT(qkv::attention(q, subnormal, subnormal).count_nonzero().item<int64_t>(), 0);
  at::set_num_threads(before);
}

/// Which way the caller rounds, and what it lets trap, is not the kernels' business. (A scale of
/// 1/4 is the same in all modes.)
TEST(Invariance, RoundingAndTraps) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  const Tensor mask = torch::rand({150, 300}) < 0.7;
  for (const auto type : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    const Tensor q = torch::randn({4, 150, 16}).to(type).requires_grad_(),
                 k = torch::randn({4, 300, 16}).to(type);
    const auto results = [&] {
      const Tensor out = qkv::attention(q, k, k, qkv::AttentionOptions().attn_mask(mask));
      const Tensor grad = torch::autograd::grad({out}, {q}, {torch::ones_like(out)}, true, true)[0];
      return std::vector<Tensor>{out, grad,
                                 torch::autograd::grad({grad}, {q}, {torch::ones_like(grad)})[0]};
    };
    const auto expected = results();
    for (const int rounding : {FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO}) {
      std::fesetround(rounding);
      const auto found = results();
      std::fesetround(FE_TONEAREST);
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(torch::equal(found[i], expected[i])) << type << ", result " << i;
      }
    }
#ifdef __GLIBC__
    feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW);
    results();
    fedisableexcept(FE_ALL_EXCEPT);
#endif
  }
  at::set_num_threads(before);
}

/// A pair that a mask leaves out of one row decides how a whole block of a tile is computed.
TEST(Invariance, RowsBesideAMaskedOne) {
  constexpr int64_t kRow = 70, kKey = 130;
  for (const int64_t head_dim : {24, 64, 128, 160}) {
    const Tensor q = torch::randn({1, 2, 200, head_dim}).requires_grad_(),
                 k = torch::randn({1, 2, 300, head_dim}), v = torch::randn({1, 2, 300, head_dim}),
                 grad = torch::randn({1, 2, 200, head_dim});
    const auto rows = [&](const qkv::AttentionOptions& options) {
      const auto [out, lse] = qkv::attention_with_lse(q, k, v, options);
      Results results{
          {torch::autograd::grad({out}, {q}, {grad})[0], out.detach(), lse.detach().unsqueeze(-1)}};
      for (Tensor& x : results.tensors) {
        x = torch::cat({x.slice(2, 0, kRow), x.slice(2, kRow + 1)}, 2);
      }
      return results;
    };
    Tensor mask = torch::ones({200, 300}, torch::kBool);
    mask[kRow][kKey] = false;
    const qkv::AttentionOptions plain;
    EXPECT_TRUE(rows(plain) == rows(qkv::AttentionOptions(plain).attn_mask(mask))) << head_dim;
  }
}

/// With few threads the splits of the keys (of the rows, in second order) add to the mask's
/// gradient, with many it has a pass of its own.
TEST(Invariance, GradientOfAMaskThatIsBroadcast) {
  const int before = at::get_num_threads();
  const std::vector<std::vector<int64_t>> shapes = {
      {1, 1300}, {150, 1}, {4, 1, 1300}, {4, 150, 1300}, {2, 1, 150, 1300}};
  for (const auto& shape : shapes) {
    for (const bool grouped : {true, false}) {
      for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
        Problem problem;
        problem.mask = torch::randn(shape);
        if (!grouped) {
          problem.key = torch::randn({2, 4, 1300, 24});
          problem.value = torch::randn({2, 4, 1300, 17});
        }
        for (Tensor* x : {&problem.query, &problem.key, &problem.value, &problem.grad}) {
          *x = x->to(dtype);
        }
        at::set_num_threads(1);
        const Results expected = problem.run();
        at::set_num_threads(16);
        EXPECT_TRUE(problem.run() == expected) << shape << (grouped ? " grouped " : " ") << dtype;
      }
    }
  }
  at::set_num_threads(before);
}

/// In second order the rows of one query, which share a row of the mask, may be in tiles of two
/// parts of the rows.
TEST(Invariance, GradientOfAMaskThatHeadsOfAGroupShare) {
  Problem problem;
  problem.query = torch::randn({2, 3, 401, 24});
  problem.key = torch::randn({2, 1, 130, 24});
  problem.value = torch::randn({2, 1, 130, 17});
  problem.grad = torch::randn({2, 3, 401, 17});
  problem.slopes = 1e-3 * torch::rand({3});  // or rows would see the last keys only
  problem.sinks = torch::randn({3});
  const int before = at::get_num_threads();
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{401, 130}, {2, 1, 401, 130}}) {
    problem.mask = torch::randn(shape);
    at::set_num_threads(1);
    const Results expected = problem.run();
    for (int threads : {2, 3, 4, 16}) {
      at::set_num_threads(threads);
      EXPECT_TRUE(problem.run() == expected) << shape << ", " << threads << " threads";
    }
  }
  at::set_num_threads(before);
}

/// More heads than have buffers at a time, of keys and of rows that are cut.
TEST(Invariance, HeadsThatTakeOverBuffers) {
  Problem problem;
  problem.query = torch::randn({1, 7, 1100, 8});
  problem.key = torch::randn({1, 7, 1100, 8});
  problem.value = torch::randn({1, 7, 1100, 9});
  problem.grad = torch::randn({1, 7, 1100, 9});
  problem.mask = torch::randn({1100, 1100});
  problem.slopes = torch::rand({7});
  problem.sinks = torch::randn({7});
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const Results expected = problem.run();
  for (int threads : {2, 3, 2, 3}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(problem.run() == expected) << threads << " threads";
  }
  at::set_num_threads(before);
}

TEST(Invariance, RestOfTheBatch) {
  const Problem problem;
  const Results both = problem.run();
  for (int64_t b = 0; b < 2; ++b) {
    const Results alone = problem.run(at::indexing::Slice(b, b + 1));
    for (size_t i :
         {0, 1, 2, 6, 7, 8, 9, 10, 11}) {  // not those gradients that are summed over the batch
      EXPECT_TRUE(torch::equal(alone.tensors[i], both.tensors[i].slice(0, b, b + 1))) << i;
    }
  }
}

/// Kernels read rows where they lie if these begin with a vector and follow each other, else
/// copies.
TEST(Invariance, WhereOperandsLie) {
  const auto as_it_is = [](const Tensor& x) { return x.clone(); };
  const auto one_number_later = [](const Tensor& x) {
    return torch::empty(x.numel() + 1).slice(0, 1).view(x.sizes()).copy_(x);
  };
  const auto heads_between_rows = [](const Tensor& x) {
    return x.transpose(1, 2).contiguous().transpose(1, 2);
  };
  const auto rows_apart = [](const Tensor& x) { return torch::stack({x, x + 1}, 3).select(3, 0); };
  for (const int64_t width : {8, 16, 24, 64}) {
    const Tensor query = torch::randn({1, 2, 200, width}), key = torch::randn({1, 2, 130, width}),
                 value = torch::randn({1, 2, 130, width}), grad = torch::randn_like(query);
    const auto run = [&](const auto& lie) {
      std::vector<Tensor> inputs;
      for (const Tensor& x : {query, key, value, grad}) {
        inputs.push_back(lie(x).detach().requires_grad_());
      }
      const Tensor out = qkv::attention(inputs[0], inputs[1], inputs[2],
                                        qkv::AttentionOptions().window(90, 20).scale(0.3));
      Results r{{out.detach()}};
      const auto first = torch::autograd::grad({out}, {inputs[0], inputs[1], inputs[2]},
                                               {inputs[3]}, /*retain_graph=*/true,
                                               /*create_graph=*/true);
      for (const Tensor& x : first) r.tensors.push_back(x.detach());
      for (const Tensor& x : torch::autograd::grad(first, inputs, {query, key, value})) {
        r.tensors.push_back(x);
      }
      return r;
    };
    const Results expected = run(as_it_is);
    EXPECT_TRUE(run(one_number_later) == expected) << width;
    EXPECT_TRUE(run(heads_between_rows) == expected) << width;
    EXPECT_TRUE(run(rows_apart) == expected) << width;
  }
}

/// Where a row outgrows its maximum, the rows beside it are worked on in another way.
TEST(Invariance, RowsThatOutgrowTheirMaxima) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
    const Tensor query = torch::randn({2, 300, 64}, dtype), key = torch::randn({2, 900, 64}, dtype),
                 value = torch::randn({2, 900, 40}, dtype);
    Tensor with_sharp_rows = query.clone();
    with_sharp_rows.slice(1, 10, {}, 30).mul_(20);
    const auto others = [](const Tensor& x) {
      return torch::cat({x.slice(1, 0, 10), x.slice(1, 11, 40), x.slice(1, 41, 70)}, 1);
    };
    const auto plain = qkv::AttentionOptions().query_offset(600);
    for (const auto& options :
         {plain, qkv::AttentionOptions(plain).is_causal(true),
          qkv::AttentionOptions(plain).scale(-0.1),
          qkv::AttentionOptions(plain).attn_mask(torch::randn({300, 900}, dtype)),
          qkv::AttentionOptions(plain).attn_mask(torch::rand({300, 900}) < 0.9)}) {
      const auto [out, lse] = qkv::attention_with_lse(query, key, value, options);
      const auto [out_beside, lse_beside] =
          qkv::attention_with_lse(with_sharp_rows, key, value, options);
      EXPECT_FALSE(torch::equal(out, out_beside)) << dtype;
      EXPECT_TRUE(torch::equal(others(out), others(out_beside))) << dtype;
      EXPECT_TRUE(torch::equal(others(lse), others(lse_beside))) << dtype;
    }
  }
}

TEST(Invariance, SeveralCallersAtOnce) {
  const Problem problem;
  const Results expected = problem.run();
  std::vector<Results> found(4);
  std::vector<std::thread> threads;
  for (Results& result : found) threads.emplace_back([&] { result = problem.run(); });
  for (std::thread& thread : threads) thread.join();
  for (const Results& result : found) EXPECT_TRUE(result == expected);
}

TEST(Invariance, InsideAParallelRegion) {
  const Problem problem;
  const Results expected = problem.run();
  std::vector<Results> found(4);
  at::parallel_for(0, 4, 1, [&](int64_t begin, int64_t end) {
    torch::AutoGradMode grad_mode(true);
    for (int64_t i = begin; i < end; ++i) found[i] = problem.run();
  });
  for (const Results& result : found) EXPECT_TRUE(result == expected);
}

}  // namespace
