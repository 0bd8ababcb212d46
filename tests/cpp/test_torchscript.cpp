// The operator inside a TorchScript graph, in a process without Python. (Models that Python saved
// are loaded and trained by examples/language_model/run_exported.cpp.)

#include <gtest/gtest.h>
#include <qkv/qkv.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/irparser.h>
#include <torch/script.h>
#include <torch/torch.h>

#include "reference.h"

namespace {

using torch::Tensor;

/// attention(q, k, v, is_causal=True, window=[3, 0], query_offset=1) as a scripted function.
Tensor scripted(const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto graph = std::make_shared<torch::jit::Graph>();
  torch::jit::parseIR(R"IR(
graph(%q : Tensor, %k : Tensor, %v : Tensor):
  %none : NoneType = prim::Constant()
  %zero : float = prim::Constant[value=0.]()
  %true : bool = prim::Constant[value=1]()
  %false : bool = prim::Constant[value=0]()
  %three : int = prim::Constant[value=3]()
  %left : int = prim::Constant[value=0]()
  %window : int[] = prim::ListConstruct(%three, %left)
  %offset : int = prim::Constant[value=1]()
  %out : Tensor = qkv::attention(%q, %k, %v, %none, %zero, %true, %none, %false, %window, %offset, %zero, %none, %none, %none)
  return (%out)
)IR",
                      graph.get());
  torch::jit::GraphFunction function("attend", graph, nullptr);
  return function({q, k, v}).toTensor();
}

Tensor eager(const Tensor& q, const Tensor& k, const Tensor& v) {
  return qkv::attention(q, k, v,
                        qkv::AttentionOptions().is_causal(true).window(3, 0).query_offset(1));
}

Tensor leaf() { return torch::randn({1, 2, 5, 3}, torch::kDouble).requires_grad_(); }

TEST(TorchScript, GivesTheSame) {
  const Tensor q = leaf(), k = leaf(), v = leaf();
  EXPECT_TRUE(torch::equal(scripted(q, k, v), eager(q, k, v)));
}

/// attention_with_lse with every option as a scripted function.
std::tuple<Tensor, Tensor> scripted_with_every_option(const std::vector<c10::IValue>& tensors) {
  const auto graph = std::make_shared<torch::jit::Graph>();
  torch::jit::parseIR(R"IR(
graph(%q : Tensor, %k : Tensor, %v : Tensor, %mask : Tensor, %slopes : Tensor, %sinks : Tensor, %key_mask : Tensor):
  %dropout : float = prim::Constant[value=0.]()
  %scale : float = prim::Constant[value=0.8]()
  %softcap : float = prim::Constant[value=2.]()
  %true : bool = prim::Constant[value=1]()
  %three : int = prim::Constant[value=3]()
  %right : int = prim::Constant[value=0]()
  %window : int[] = prim::ListConstruct(%three, %right)
  %offset : int = prim::Constant[value=2]()
  %out : Tensor, %lse : Tensor = qkv::attention_with_lse(%q, %k, %v, %mask, %dropout, %true, %scale, %true, %window, %offset, %softcap, %slopes, %sinks, %key_mask)
  %both : (Tensor, Tensor) = prim::TupleConstruct(%out, %lse)
  return (%both)
)IR",
                      graph.get());
  torch::jit::GraphFunction function("attend", graph, nullptr);
  const auto both = function(tensors).toTuple();
  return {both->elements()[0].toTensor(), both->elements()[1].toTensor()};
}

/// Results, all gradients, and all derivatives of those, against LibTorch's own of the reference.
TEST(TorchScript, DifferentiatesTwiceWithEveryOption) {
  const auto normal = [](at::IntArrayRef shape) {
    return torch::randn(shape, torch::kDouble).requires_grad_();
  };
  const Tensor q = normal({2, 4, 3, 5}), k = normal({2, 2, 6, 5}), v = normal({2, 2, 6, 3}),
               mask = normal({4, 3, 6}), slopes = normal({2, 4}), sinks = normal({4}),
               key_mask = torch::rand({2, 6}) < 0.7;
  const std::vector<Tensor> leaves = {q, k, v, mask, slopes, sinks};
  const auto derivatives = [&](const Tensor& out, const Tensor& lse) {
    std::vector<Tensor> all = {out, lse};
    const auto first = torch::autograd::grad({out.sin().sum() + lse.cos().sum()}, leaves, {},
                                             /*retain_graph=*/true, /*create_graph=*/true);
    Tensor energy = torch::zeros({}, torch::kDouble);
    for (const Tensor& x : first) energy = energy + x.sin().sum();
    const auto second = torch::autograd::grad({energy}, leaves);
    all.insert(all.end(), first.begin(), first.end());
    all.insert(all.end(), second.begin(), second.end());
    return all;
  };

  const auto [found_out, found_lse] =
      scripted_with_every_option({q, k, v, mask, slopes, sinks, key_mask});
  const auto found = derivatives(found_out, found_lse);

  const qkv::Operands operands{q,   k,   v,   mask,     slopes, sinks, key_mask, std::nullopt,
                               0.8, 2.0, 0.0, {3, 0, 2}};
  const auto [out, lse] = qkv::reference::attention(operands);
  const auto expected = derivatives(out, lse);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(found[i], expected[i])) << "number " << i;
  }
}

}  // namespace
