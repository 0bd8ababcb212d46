// gradcheck.h itself: it accepts right gradients and catches wrong ones.

#include <gtest/gtest.h>

#include "gradcheck.h"

namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor input() { return torch::randn({2, 3}, torch::kDouble).requires_grad_(); }

/// x³, whose gradient is off by a factor (1 = right) in the first or second order.
struct Cube : torch::autograd::Function<Cube> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, double first, double second) {
    ctx->save_for_backward({x});
    ctx->saved_data["first"] = first;
    ctx->saved_data["second"] = second;
    return x.pow(3);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor x = ctx->get_saved_variables()[0];
    const double first = ctx->saved_data["first"].toDouble();
    const double second = ctx->saved_data["second"].toDouble();
    // The value of 3x², but with a derivative `second` times that.
    const Tensor slope = second * 3 * x * x + (1 - second) * (3 * x * x).detach();
    return {first * grads[0] * slope, {}, {}};
  }
};

gradcheck::Function cube(double first, double second) {
  return [=](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{Cube::apply(x[0], first, second)};
  };
}

TEST(Gradcheck, AcceptsRightGradients) {
  EXPECT_EQ(gradcheck::first_order(cube(1, 1), {input()}), "");
  EXPECT_EQ(gradcheck::second_order(cube(1, 1), {input()}), "");
  const gradcheck::Function two_outputs = [](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{x[0].sin() * x[1], x[0].matmul(x[1].t())};
  };
  EXPECT_EQ(gradcheck::first_order(two_outputs, {input(), input()}), "");
  EXPECT_EQ(gradcheck::second_order(two_outputs, {input(), input()}), "");
  EXPECT_EQ(gradcheck::forward_mode(two_outputs, {input(), input()}), "");
  EXPECT_EQ(gradcheck::forward_over_reverse(two_outputs, {input(), input()}), "");
}

TEST(Gradcheck, CatchesAWrongGradient) {
  EXPECT_NE(gradcheck::first_order(cube(1.01, 1), {input()}), "");
}

TEST(Gradcheck, CatchesAWrongSecondGradient) {
  EXPECT_EQ(gradcheck::first_order(cube(1, 1.01), {input()}), "");
  EXPECT_NE(gradcheck::second_order(cube(1, 1.01), {input()}), "");
}

TEST(Gradcheck, CatchesAMissingTangent) {
  const gradcheck::Function f = [](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{x[0].detach() * x[1]};
  };
  EXPECT_NE(gradcheck::forward_mode(f, {input(), input()}), "");
}

TEST(Gradcheck, CatchesAMissingGradient) {
  const gradcheck::Function detached = [](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{x[0].detach() * x[1]};
  };
  EXPECT_NE(gradcheck::first_order(detached, {input(), input()}), "");
}

TEST(Gradcheck, CatchesASecondOutput) {
  const gradcheck::Function second_is_wrong = [](const std::vector<Tensor>& x) {
    return std::vector<Tensor>{x[0].exp(), Cube::apply(x[0], 2.0, 1.0)};
  };
  EXPECT_NE(gradcheck::first_order(second_is_wrong, {input()}), "");
}

}  // namespace
