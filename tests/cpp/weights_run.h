#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernel_run.h"

// Weights and their backward, as kernel_run.h has it for outputs.

namespace kernel_run {

/// The largest differences to loops in double.
struct WeightsErrors {
  double weights = 0.0, lse = 0.0, dots = 0.0, gradients = 0.0;
};

/// One problem of float32 or float64, or of bfloat16.
template <class T>
class WeightsRun {
 public:
  WeightsRun(const Shape& shape, int64_t splits, const ForwardKernels<T>& forward,
             const BackwardKernels<T>& backward, bool in_bfloat16 = false)
      : s_(shape), in_bfloat16_(in_bfloat16) {
    draw_numbers();
    WeightsParams<T> params{};
    params.forward.problem = problem();
    params.forward.out_storage = params.forward.problem.key_value_storage;
    Rows weights(*this, s_.heads * s_.queries * s_.keys);
    params.forward.out = operand<T>(weights.data(), s_.queries, s_.keys);
    params.forward.lse = lse_.data();
    params.forward.lse_rest = lse_rest_.data();
    run(forward, params);
    weights_ = weights.numbers();

    params.grad = operand<const T>(grad_.data(), s_.queries, s_.keys);
    const BackwardKernels<T>& of_rows = forward.has_scores_of_derivatives(params.forward.problem)
                                            ? backward
                                            : *forward.few_rows_backward;
    if (!makes_minus_dots(of_rows, params.forward.problem)) {
      params.dots = dots_.data();
      run(forward, params);
    }
    run_backward(params, splits, of_rows);
  }

  WeightsErrors errors(double rounding = 0.0) const {
    const int64_t group = s_.heads / s_.kv_heads;
    const auto grad = grad_.numbers(), q = q_.numbers(), k = k_.numbers();
    std::vector<double> dq(q.size()), dk(k.size());
    WeightsErrors worst;
    const auto take = [](double& worst, double a, double b, double of_rounding = 0.0) {
      const double d = a == b ? 0.0 : std::abs(a - b) - of_rounding * std::abs(a);
      if (!std::isnan(worst) && !(d <= worst)) worst = d;  // NaN stays
    };
    for (int64_t row = 0; row < s_.heads * s_.queries; ++row) {
      const int64_t h = row / s_.queries, position = row % s_.queries + s_.band.offset;
      const int64_t first_key = h / group * s_.keys;
      std::vector<double> p(s_.keys), slope(s_.keys, 1.0);
      double sum = s_.options ? std::exp(double(sinks_[h])) : 0.0, dot = 0.0;
      for (int64_t j = 0; j < s_.keys; ++j) {
        const bool keep = (s_.band.left < 0 || j >= position - s_.band.left) &&
                          (s_.band.right < 0 || j <= position + s_.band.right);
        if (!keep) continue;
        double score = 0.0;
        for (int64_t d = 0; d < s_.head_dim; ++d) {
          score += double(q[row * s_.head_dim + d]) * k[(first_key + j) * s_.head_dim + d];
        }
        score *= double(T(s_.scale));
        if (s_.has_softcap()) {
          const double t = std::tanh(score / kSoftcap);
          slope[j] = 1.0 - t * t;
          score = t * kSoftcap;
        }
        if (s_.options) score -= slopes_[h] * std::abs(double(position - j));
        sum += p[j] = std::exp(score);
      }
      for (int64_t j = 0; j < s_.keys; ++j) {
        if (p[j] == 0.0) continue;
        p[j] /= sum;
        dot += p[j] * grad[row * s_.keys + j];
      }
      for (int64_t j = 0; j < s_.keys; ++j) {
        take(worst.weights, p[j], weights_[row * s_.keys + j], rounding);
        if (p[j] == 0.0) continue;
        const double ds = p[j] * (grad[row * s_.keys + j] - dot) * slope[j] * double(T(s_.scale));
        for (int64_t d = 0; d < s_.head_dim; ++d) {
          dq[row * s_.head_dim + d] += ds * k[(first_key + j) * s_.head_dim + d];
          dk[(first_key + j) * s_.head_dim + d] += ds * q[row * s_.head_dim + d];
        }
      }
      take(worst.lse, std::log(sum), lse_[row]);
      take(worst.dots, dot, dots_[row]);
    }
    for (size_t i = 0; i < dq.size(); ++i) take(worst.gradients, dq[i], dq_[i], rounding);
    for (size_t i = 0; i < dk.size(); ++i) take(worst.gradients, dk[i], dk_[i], rounding);
    return worst;
  }

 private:
  /// Numbers as kernels have them, which end at a page that nobody may touch.
  class Rows {
   public:
    Rows(const WeightsRun& run, int64_t size)
        : is_half_(run.in_bfloat16_),
          size_(size),
          memory_(memory(size * (is_half_ ? 2 : sizeof(T)))) {}
    T* data() const { return static_cast<T*>(memory_.get()); }

    std::vector<T> numbers() const {
      std::vector<T> x(size_);
      for (int64_t i = 0; i < size_; ++i) {
        const uint32_t bits = is_half_ ? uint32_t{halves()[i]} << 16 : 0;
        float wide;
        std::memcpy(&wide, &bits, sizeof(wide));
        x[i] = is_half_ ? static_cast<T>(wide) : data()[i];
      }
      return x;
    }
    template <class Draw>
    void fill(Draw draw) {
      for (int64_t i = 0; i < size_; ++i) {
        auto x = static_cast<float>(draw());
        if (is_half_) {
          halves()[i] = bfloat16_of(x);
        } else {
          data()[i] = x;
        }
      }
    }

   private:
    uint16_t* halves() const { return static_cast<uint16_t*>(memory_.get()); }
    bool is_half_;
    int64_t size_;
    std::unique_ptr<void, Unmap> memory_;
  };

  void draw_numbers() {
    std::mt19937 random(7);
    std::normal_distribution<double> normal;
    const auto draw = [&] { return normal(random); };
    for (Rows* x : {&q_, &k_, &grad_}) x->fill(draw);
    for (T& slope : slopes_) slope = static_cast<T>(std::abs(draw()) / 16);
    for (T& sink : sinks_) sink = static_cast<T>(draw());
  }

  Problem<T> problem() const {
    Problem<T> p = sizes_of<T>(s_);
    p.key_value_storage = in_bfloat16_ ? Storage::kBFloat16 : Storage::kSame;
    p.scale = T(s_.scale);
    p.band = s_.band;
    p.query = operand<const T>(q_.data(), s_.queries, s_.head_dim);
    p.key = operand<const T>(k_.data(), s_.keys, s_.head_dim);
    if (s_.has_softcap()) p.softcap = T(kSoftcap);
    if (s_.options) {
      p.alibi_slopes.data = slopes_.data();
      p.alibi_slopes.head_stride = 1;
      p.sinks.data = sinks_.data();
      p.sinks.head_stride = 1;
    }
    return p;
  }

  void run(const ForwardKernels<T>& kernels, WeightsParams<T>& params) const {
    const int64_t prepared_bytes = kernels.forward_prepared_bytes(params.forward, 1);
    const auto prepared = memory(prepared_bytes);
    params.forward.prepared = prepared_bytes > 0 ? prepared.get() : nullptr;
    for (int64_t head = 0; prepared_bytes > 0 && head < s_.kv_heads; ++head) {
      kernels.prepare_forward(params.forward, head);
    }
    const Problem<T>& p = params.forward.problem;
    const auto scratch = memory(kernels.weights_scratch_bytes(p));
    for (int64_t unit = 0; unit < kernels.weights_units(p); ++unit) {
      kernels.weights(params, unit, scratch.get());
    }
  }

  static bool makes_minus_dots(const BackwardKernels<T>& kernels, const Problem<T>& p) {
    return kernels.score_gradients_size != nullptr && kernels.score_gradients_size(p) > 0;
  }

  void run_backward(const WeightsParams<T>& params, int64_t splits,
                    const BackwardKernels<T>& kernels) {
    BackwardParams<T> b{};
    b.problem = params.forward.problem;
    b.grad_weights = params.grad;
    std::vector<T> minus_delta = dots_;
    for (T& x : minus_delta) x = -x;
    b.grad_lse = b.minus_dots = minus_delta.data();
    b.lse = lse_.data();
    b.lse_rest = lse_rest_.data();
    b.splits = b.units = splits;
    Rows dq(*this, s_.heads * s_.queries * s_.head_dim),
        dk(*this, s_.kv_heads * s_.keys * s_.head_dim);
    b.grad_query = operand<T>(dq.data(), s_.queries, s_.head_dim);
    b.grad_key = operand<T>(dk.data(), s_.keys, s_.head_dim);
    const auto partial = memory(s_.kv_heads * kernels.partial_grad_query_size(b) * sizeof(T));
    b.partial_grad_query = static_cast<T*>(partial.get());
    const auto scratch = memory(kernels.backward_scratch_bytes(b));
    const int64_t tiles = kernels.backward_row_tiles(b.problem);
    std::unique_ptr<void, Unmap> score_gradients;
    const bool makes_dots = makes_minus_dots(kernels, b.problem);
    if (splits > 1 && makes_dots) {
      score_gradients = memory(s_.kv_heads * kernels.score_gradients_size(b.problem) * sizeof(T));
      b.score_gradients_of_tiles = static_cast<T*>(score_gradients.get());
      for (int64_t unit = 0; unit < s_.kv_heads * tiles; ++unit) {
        kernels.score_gradients(b, unit, scratch.get());
      }
    }
    for (int64_t unit = 0; unit < s_.kv_heads * splits; ++unit) {
      kernels.backward(b, 0, unit, scratch.get());
    }
    if (makes_dots) {
      for (size_t row = 0; row < dots_.size(); ++row) dots_[row] = -minus_delta[row];
    }
    for (int64_t unit = 0; splits > 1 && unit < s_.kv_heads * tiles; ++unit) {
      kernels.sum_grad_query(b, 0, unit, scratch.get());
    }
    dq_ = dq.numbers();
    dk_ = dk.numbers();
  }

  Shape s_;
  bool in_bfloat16_;
  Rows q_{*this, s_.heads*s_.queries*s_.head_dim}, k_{*this, s_.kv_heads*s_.keys*s_.head_dim},
      grad_{*this, s_.heads*s_.queries*s_.keys};
  std::vector<T> slopes_ = std::vector<T>(s_.heads), sinks_ = slopes_;
  std::vector<T> lse_ = std::vector<T>(s_.heads * s_.queries), lse_rest_ = lse_, dots_ = lse_;
  std::vector<T> weights_, dq_, dk_;
};

}  // namespace kernel_run
