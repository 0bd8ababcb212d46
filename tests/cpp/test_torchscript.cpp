// The operator inside a TorchScript graph, in a process without Python. (Models that Python saved
// are loaded and trained by examples/language_model/run_exported.cpp.)

#include <gtest/gtest.h>
#include <qkv/qkv.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/irparser.h>
#include <torch/script.h>
#include <torch/torch.h>

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

TEST(TorchScript, DifferentiatesTwice) {
  const Tensor q = leaf(), k = leaf(), v = leaf();
  const auto second = [&](const auto& attend) {
    const Tensor energy = attend(q, k, v).sin().sum();
    const Tensor force = torch::autograd::grad({energy}, {q}, {}, true, true)[0];
    return torch::autograd::grad({force.pow(2).sum()}, {k})[0];
  };
  EXPECT_TRUE(torch::allclose(second(scripted), second(eager)));
}

}  // namespace
