#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "dual.h"
#include "guarded_memory.h"
#include "kernels/cpu/isa.h"
#include "shape.h"

// One problem run by kernels without torch, unit by unit, and what loops in double make of it.

namespace kernel_run {

using namespace qkv::kernels;

template <class T>
const CpuKernels<T>& kernels_of(const CpuKernelTable& table) {
  if constexpr (sizeof(T) == 4) {
    return table.float32;
  } else {
    return table.float64;
  }
}

constexpr double kSoftcap = 1.5;
constexpr int64_t kSeed = 0x123456789abcdef;

/// The largest differences to loops in double.
struct Errors {
  double output = 0.0, lse = 0.0, gradients = 0.0;
  double along = 0.0;  // of the derivatives of outputs and gradients along the directions

  double largest() const { return std::max({output, lse, gradients, along}); }
};

/// The upper half of a float, and what is left of the float.
inline uint16_t bfloat16_of(float& x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits &= 0xffff0000;
  std::memcpy(&x, &bits, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

/// A float cut off to what float16 holds, 0 if that is subnormal.
inline uint16_t float16_of(float& x) {
  if (std::abs(x) < 0x1p-14f) x = 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits &= 0xffffe000;
  std::memcpy(&x, &bits, sizeof(bits));
  const uint32_t size = bits & 0x7fffffff;
  return static_cast<uint16_t>((bits >> 31 << 15) | (size == 0 ? 0 : (size >> 13) - (112 << 10)));
}

/// Kernels that read 16 bits, to be run instead of others or after them.
struct OfHalf {
  const HalfForwardKernels* forward = nullptr;
  const HalfBackwardKernels* backward = nullptr;
  const HalfTangentKernels* tangents = nullptr;
  Storage storage = Storage::kBFloat16;
};

/// (heads, rows, width), dense.
template <class U>
Operand<U> operand(U* data, int64_t rows, int64_t width) {
  Operand<U> x{};
  x.data = data;
  x.head_stride = rows * width;
  x.row_stride = width;
  x.column_stride = 1;
  return x;
}

/// One problem in dense tensors, run unit by unit.
template <class T>
class KernelRun {
 public:
  KernelRun(const CpuKernelTable& table, const Shape& shape, int64_t splits,
            const OfHalf& of_half = {})
      : kernels_(kernels_of<T>(table)), s_(shape) {
    draw_numbers();
    if (of_half.forward != nullptr || of_half.backward != nullptr) store_in_16_bits(of_half);
    const Problem<T> p = problem();
    run_forward_twice(of_half, p);
    run_backward(of_half, p, splits);
  }

  const std::vector<T>& outputs() const { return out_; }

  /// How far the weights of the derivatives are from adding up to 1: then each column of dV would
  /// add up to that of dO.
  double excess() const {
    double worst = 0.0;
    for (int64_t d = 0; d < s_.value_dim; ++d) {
      double sum = 0.0, expected = 0.0, size = 0.0;
      for (size_t x = d; x < dv_.size(); x += s_.value_dim) sum += dv_[x];
      for (size_t x = d; x < g_.size(); x += s_.value_dim) {
        expected += g_[x];
        size += std::abs(g_[x]);
      }
      worst = std::max(worst, std::abs(sum - expected) / size);
    }
    return worst;
  }

  /// All outputs, gradients and derivatives along directions.
  std::vector<T> results() const {
    std::vector<T> all;
    for (const auto* x : {&out_, &dq_, &dk_, &dv_, &out_t_, &dq_t_, &dk_t_, &dv_t_}) {
      all.insert(all.end(), x->begin(), x->end());
    }
    return all;
  }

  /// The differences to loops in double; of gradients without what rounding them may take, a part
  /// of each.
  Errors errors(double rounding = 0.0) const {
    const auto dual = [](const std::vector<T>& x, const std::vector<T>& x_t) {
      std::vector<Dual> result(x.size());
      for (size_t i = 0; i < x.size(); ++i) result[i] = {double(x[i]), double(x_t[i])};
      return result;
    };
    const auto q = dual(q_, q_t_), k = dual(k_, k_t_), v = dual(v_, v_t_);
    const auto slopes = dual(slopes_, slopes_t_), sinks = dual(sinks_, sinks_t_);
    std::vector<Dual> out(g_.size()), lse(lse_.size()), dq(q.size()), dk(k.size()), dv(v.size());
    for (int64_t h = 0; h < s_.heads; ++h) {
      const int64_t g = h / (s_.heads / s_.kv_heads);
      const int64_t first_k = g * s_.keys * s_.head_dim, first_v = g * s_.keys * s_.value_dim;
      for (int64_t i = 0; i < s_.queries; ++i) {
        const int64_t row = h * s_.queries + i, position = i + s_.band.offset;
        const Dual* q_i = &q[row * s_.head_dim];
        Dual* out_i = &out[row * s_.value_dim];
        const T* grad = &g_[row * s_.value_dim];
        std::vector<Dual> p(s_.keys), dp(s_.keys), cap_slope(s_.keys, 1.0);
        Dual sum = s_.options ? exp(sinks[h]) : 0.0;
        for (int64_t j = 0; j < s_.keys; ++j) {
          const bool keep = (s_.band.left < 0 || j >= position - s_.band.left) &&
                            (s_.band.right < 0 || j <= position + s_.band.right);
          Dual score;
          for (int64_t d = 0; d < s_.head_dim; ++d) {
            score += q_i[d] * k[first_k + j * s_.head_dim + d];
          }
          score = score * double(T(s_.scale));
          if (s_.has_softcap()) {
            const Dual t = tanh(score / kSoftcap);
            cap_slope[j] = Dual(1.0) - t * t;
            score = t * kSoftcap;
          }
          if (s_.options) score = score - slopes[h] * std::abs(double(position - j));
          p[j] = keep ? exp(score) : 0.0;
          sum += p[j];
        }
        Dual delta;
        for (int64_t j = 0; j < s_.keys; ++j) {
          p[j] = sum.value == 0.0 ? 0.0 : p[j] / sum;
          for (int64_t d = 0; d < s_.value_dim; ++d) {
            const Dual value = v[first_v + j * s_.value_dim + d];
            out_i[d] += p[j] * value;
            dp[j] += value * double(grad[d]);
            dv[first_v + j * s_.value_dim + d] += p[j] * double(grad[d]);
          }
          delta += p[j] * dp[j];
        }
        for (int64_t j = 0; j < s_.keys; ++j) {
          const Dual ds = p[j] * (dp[j] - delta) * cap_slope[j] * double(T(s_.scale));
          for (int64_t d = 0; d < s_.head_dim; ++d) {
            dq[row * s_.head_dim + d] += ds * k[first_k + j * s_.head_dim + d];
            dk[first_k + j * s_.head_dim + d] += ds * q_i[d];
          }
        }
        lse[row] = sum.value == 0.0 ? Dual(-std::numeric_limits<double>::infinity()) : log(sum);
      }
    }

    Errors worst;
    const auto compare = [](double& worst, double& along, const std::vector<Dual>& expected,
                            const std::vector<T>& found, const std::vector<T>& found_t,
                            double of_rounding = 0.0) {
      const auto take = [of_rounding](double& worst, double a, double b) {
        const double d = a == b ? 0.0 : std::abs(a - b) - of_rounding * std::abs(a);
        if (!std::isnan(worst) && !(d <= worst)) worst = d;  // NaN stays
      };
      for (size_t x = 0; x < expected.size(); ++x) {
        take(worst, expected[x].value, found[x]);
        take(along, expected[x].moved, found_t[x]);
      }
    };
    compare(worst.output, worst.along, out, out_, out_t_);
    compare(worst.lse, worst.lse, lse, lse_, lse_t_);
    compare(worst.gradients, worst.along, dq, dq_, dq_t_, rounding);
    compare(worst.gradients, worst.along, dk, dk_, dk_t_, rounding);
    compare(worst.gradients, worst.along, dv, dv_, dv_t_, rounding);
    return worst;
  }

 private:
  /// The rows a multiple of 1024 bytes apart, with NaN between them.
  Operand<const T> far_apart(const std::vector<T>& rows, int64_t width, std::vector<T>& memory) {
    constexpr auto k1024Bytes = static_cast<int64_t>(1024 / sizeof(T));
    const int64_t row = (width / k1024Bytes + 1) * k1024Bytes, count = s_.kv_heads * s_.keys;
    memory.assign(count * row, std::numeric_limits<T>::quiet_NaN());
    for (int64_t r = 0; r < count; ++r) {
      std::copy_n(&rows[r * width], width, &memory[r * row]);
    }
    return operand<const T>(memory.data(), s_.keys, row);
  }

  void draw_numbers() {
    std::mt19937 random(7);
    std::normal_distribution<double> normal;
    const auto fill = [&](std::vector<T>& x, int64_t size) {
      x.resize(size);
      for (T& number : x) number = static_cast<T>(normal(random));
    };
    fill(q_, s_.heads * s_.queries * s_.head_dim);
    fill(k_, s_.kv_heads * s_.keys * s_.head_dim);
    fill(v_, s_.kv_heads * s_.keys * s_.value_dim);
    fill(g_, s_.heads * s_.queries * s_.value_dim);
    fill(slopes_, s_.heads);
    fill(sinks_, s_.heads);
    for (T& slope : slopes_) slope = std::abs(slope) / 16;
    fill(q_t_, q_.size());
    fill(k_t_, k_.size());
    fill(v_t_, v_.size());
    fill(slopes_t_, s_.heads);
    fill(sinks_t_, s_.heads);
    for (T& slope : slopes_t_) slope /= 16;
    out_.resize(g_.size());
    lse_.resize(s_.heads * s_.queries);
    lse_rest_.resize(lse_.size());
    dq_.resize(q_.size());
    dk_.resize(k_.size());
    dv_.resize(v_.size());
  }

  /// The numbers cut off to what 16 bits hold, and those bits.
  void store_in_16_bits(const OfHalf& of_half) {
    if constexpr (sizeof(T) == 4) {
      const auto half_of = of_half.storage == Storage::kFloat16 ? float16_of : bfloat16_of;
      const auto store = [half_of](std::vector<T>& from, std::vector<uint16_t>& to) {
        for (T& x : from) to.push_back(half_of(x));
      };
      store(q_, q16_);
      store(k_, k16_);
      store(v_, v16_);
      store(g_, g16_);
      store(q_t_, q_t16_);
      store(k_t_, k_t16_);
      store(v_t_, v_t16_);
      if (s_.has_nan) {
        const int64_t first = (s_.queries + s_.band.offset) * s_.value_dim;
        const uint16_t nan = of_half.storage == Storage::kFloat16 ? 0x7e00 : 0x7fc0;
        std::fill_n(v16_.begin() + first, 4 * s_.value_dim, nan);
      }
    }
  }

  Problem<T> problem() {
    Problem<T> p = sizes_of<T>(s_);
    p.scale = T(s_.scale);
    p.band = s_.band;
    p.query = operand<const T>(q_.data(), s_.queries, s_.head_dim);
    p.key = operand<const T>(k_.data(), s_.keys, s_.head_dim);
    p.value = operand<const T>(v_.data(), s_.keys, s_.value_dim);
    if (s_.keys_far_apart) p.key = far_apart(k_, s_.head_dim, far_k_);
    if (s_.values_far_apart) p.value = far_apart(v_, s_.value_dim, far_v_);
    if (s_.has_softcap()) p.softcap = T(kSoftcap);
    if (s_.drops) {
      p.dropout.threshold = 1 << 14;
      p.dropout.seed = &kSeed;
    }
    if (s_.options) {
      p.alibi_slopes.data = slopes_.data();
      p.alibi_slopes.head_stride = 1;
      p.sinks.data = sinks_.data();
      p.sinks.head_stride = 1;
    }
    return p;
  }

  /// Tiles that take turns leave the same bits.
  void run_forward_twice(const OfHalf& of_half, const Problem<T>& p) {
    const ForwardKernels<T>* kernels = &kernels_;
    ForwardParams<T> forward{};
    forward.problem = p;
    if constexpr (sizeof(T) == 4) {
      if (of_half.forward != nullptr && of_half.forward->takes(p)) {
        kernels = of_half.forward;
        read_in_16_bits(forward.problem, of_half.storage);
      }
    }
    forward.out = operand<T>(out_.data(), s_.queries, s_.value_dim);
    forward.lse = lse_.data();
    forward.lse_rest = lse_rest_.data();
    run_forward(*kernels, forward, 1);
    const auto out = out_, lse = lse_;
    out_.assign(out.size(), std::numeric_limits<T>::quiet_NaN());
    lse_.assign(lse.size(), std::numeric_limits<T>::quiet_NaN());
    run_forward(*kernels, forward, s_.keys_far_apart ? 8 : 3);
    EXPECT_EQ(0, std::memcmp(out.data(), out_.data(), out.size() * sizeof(T)));
    EXPECT_EQ(0, std::memcmp(lse.data(), lse_.data(), lse.size() * sizeof(T)));
  }

  /// The backward and the tangents, in numbers and then, perhaps, in 16 bits.
  void run_backward(const OfHalf& of_half, const Problem<T>& p, int64_t splits) {
    BackwardParams<T> backward{};
    backward.problem = p;
    backward.grad_out = operand<const T>(g_.data(), s_.queries, s_.value_dim);
    backward.out = operand<const T>(out_.data(), s_.queries, s_.value_dim);
    backward.lse = lse_.data();
    backward.lse_rest = lse_rest_.data();
    results_go_to(backward, dq_, dk_, dv_);
    backward.splits = backward.units = splits;
    const BackwardKernels<T>& of_splits = backward_after(&kernels_, kernels_, p);
    run_backward(of_splits, backward);
    if (&of_splits == &kernels_) run_backward_in_longer_units(kernels_, backward, dq_, dk_, dv_);
    run_tangents(kernels_, backward);
    if constexpr (sizeof(T) == 4) {
      if (of_half.backward != nullptr) run_in_bfloat16(of_half, backward);
    }
  }

  void run_backward(const BackwardKernels<T>& kernels, BackwardParams<T> backward) {
    const auto partial =
        memory(s_.kv_heads * kernels.partial_grad_query_size(backward) * sizeof(T));
    backward.partial_grad_query = static_cast<T*>(partial.get());
    run_splits(backward, backward.units, kernels.backward_row_tiles(backward.problem),
               kernels.backward_scratch_bytes(backward), kernels.backward, kernels.sum_grad_query);
  }

  /// Again with several splits a unit, which must not change a bit of the results.
  template <class Stored>
  void run_backward_in_longer_units(const BackwardKernels<T>& kernels, BackwardParams<T> backward,
                                    std::vector<Stored>& dq, std::vector<Stored>& dk,
                                    std::vector<Stored>& dv) {
    for (const int64_t units : {1, 2, 4}) {
      if (units >= backward.splits) continue;
      backward.units = units;
      std::vector<Stored> before[3];
      int i = 0;
      for (auto* x : {&dq, &dk, &dv}) {
        before[i++] = *x;
        std::memset(x->data(), 0xff, x->size() * sizeof(Stored));  // NaN
      }
      run_backward(kernels, backward);
      i = 0;
      for (const auto* x : {&dq, &dk, &dv}) {
        EXPECT_EQ(0, std::memcmp(before[i++].data(), x->data(), x->size() * sizeof(Stored)));
      }
    }
  }

  /// `tiles`, or the backward of few rows that goes with a forward.
  const BackwardKernels<T>& backward_after(const ForwardKernels<T>* forward,
                                           const BackwardKernels<T>& tiles,
                                           const Problem<T>& p) const {
    const bool in_tiles = s_.few_rows_in_tiles || forward == nullptr;
    return in_tiles || forward->has_scores_of_derivatives(p) ? tiles : *forward->few_rows_backward;
  }

  /// Query, key and value.
  void read_in_16_bits(Problem<T>& p, Storage storage) {
    p.query.data = pointer(q16_);
    p.key.data = pointer(k16_);
    p.value.data = pointer(v16_);
    p.key_value_storage = storage;
  }

  void results_go_to(BackwardParams<T>& backward, std::vector<T>& dq, std::vector<T>& dk,
                     std::vector<T>& dv) {
    backward.grad_query = operand<T>(dq.data(), s_.queries, s_.head_dim);
    backward.grad_key = operand<T>(dk.data(), s_.keys, s_.head_dim);
    backward.grad_value = operand<T>(dv.data(), s_.keys, s_.value_dim);
  }

  void run_forward(const ForwardKernels<T>& kernels, ForwardParams<T>& forward, int64_t in_turn) {
    const int64_t prepared_bytes = kernels.forward_prepared_bytes(forward, in_turn);
    const auto prepared = memory(prepared_bytes);
    forward.prepared = prepared_bytes > 0 ? prepared.get() : nullptr;
    for (int64_t head = 0; prepared_bytes > 0 && head < s_.kv_heads; ++head) {
      kernels.prepare_forward(forward, head);
    }
    const int64_t parts = kernels.forward_partial_size(forward);
    const auto partial = memory(parts * sizeof(T));
    forward.partial = static_cast<T*>(partial.get());
    const auto scratch = memory(kernels.forward_scratch_bytes(forward, in_turn));
    const int64_t units = kernels.forward_units(forward, in_turn);
    for (int64_t unit = 0; unit < units; ++unit) {
      kernels.forward(forward, in_turn, unit, scratch.get());
    }
    for (int64_t head = 0; parts > 0 && head < s_.kv_heads; ++head) {
      kernels.merge_forward(forward, head);
    }
  }

  /// All units of all heads, then the sums of what they left.
  template <class Params>
  void run_splits(const Params& params, int64_t units_of_head, int64_t sum_units,
                  int64_t scratch_bytes, void (*run)(const Params&, int64_t, int64_t, void*),
                  void (*sum)(const Params&, int64_t, int64_t, void*)) {
    const auto scratch = memory(scratch_bytes);
    for (int64_t unit = 0; unit < s_.kv_heads * units_of_head; ++unit) {
      run(params, 0, unit, scratch.get());
    }
    for (int64_t unit = 0; units_of_head > 1 && unit < s_.kv_heads * sum_units; ++unit) {
      sum(params, 0, unit, scratch.get());
    }
  }

  static T* pointer(std::vector<uint16_t>& x) { return reinterpret_cast<T*>(x.data()); }

  /// What was stored at pointer(from).
  static void widen(const std::vector<uint16_t>& from, std::vector<T>& to) {
    for (size_t i = 0; i < from.size(); ++i) {
      const uint32_t bits = uint32_t{from[i]} << 16;
      float x;
      std::memcpy(&x, &bits, sizeof(bits));
      to[i] = static_cast<T>(x);
    }
  }

  /// The backward and the tangents again, from and to bfloat16.
  void run_in_bfloat16(const OfHalf& of_half, BackwardParams<float> backward) {
    const HalfBackwardKernels& kernels = *of_half.backward;
    ASSERT_TRUE(kernels.takes(backward.problem));
    read_in_16_bits(backward.problem, Storage::kBFloat16);
    if (of_half.forward != nullptr && !of_half.forward->takes(backward.problem)) {
      ForwardParams<float> lse_alone{};  // of the scores in bfloat16
      lse_alone.problem = backward.problem;
      lse_alone.lse = lse_.data();
      lse_alone.lse_rest = lse_rest_.data();
      run_forward(*of_half.forward, lse_alone, 1);
    }
    backward.grad_out.data = pointer(g16_);
    // The rest of an output is what its upper half lacks; the rest of that does not matter.
    std::vector<uint16_t> out, rest, dq(q_.size()), dk(k_.size()), dv(v_.size());
    for (T x : out_) {
      T upper = x;
      out.push_back(bfloat16_of(upper));
      T left = x - upper;
      rest.push_back(bfloat16_of(left));
    }
    auto upper_half = backward.out, lower_half = backward.out;
    upper_half.data = pointer(out);
    lower_half.data = pointer(rest);
    backward.out = upper_half;
    backward.out_rest = lower_half;
    backward.grad_query.data = pointer(dq);
    backward.grad_key.data = pointer(dk);
    backward.grad_value.data = pointer(dv);
    const BackwardKernels<T>& of_splits =
        backward_after(of_half.forward, kernels, backward.problem);
    run_backward(of_splits, backward);
    if (of_splits.least_units(backward) < backward.splits) {
      run_backward_in_longer_units(of_splits, backward, dq, dk, dv);
    }
    widen(dq, dq_);
    widen(dk, dk_);
    widen(dv, dv_);
    backward.out = operand<const T>(out_.data(), s_.queries, s_.value_dim);
    backward.out_rest = {};
    ASSERT_TRUE(of_half.tangents->takes(backward.problem));
    const JvpParams<T> jvp = run_tangents(*of_half.tangents, backward);
    expect_rounded_tangents(*of_half.tangents, jvp, upper_half, lower_half);
  }

  /// Those of an output that is read in two halves and written to bfloat16 are the same, rounded.
  void expect_rounded_tangents(const TangentKernels<float>& kernels, JvpParams<T> jvp,
                               Operand<const T> out, Operand<const T> out_rest) {
    std::vector<uint16_t> stored(out_.size());
    std::vector<T> exact(out_.size()), rounded(out_.size());
    jvp.takes_means = true;  // else large moves of all scores are multiplied with O
    jvp.out_t.data = exact.data();
    run_jvp(kernels, jvp);
    jvp.out_storage = Storage::kBFloat16;
    jvp.out = out;
    jvp.out_rest = out_rest;
    jvp.out_t.data = pointer(stored);
    run_jvp(kernels, jvp);
    widen(stored, rounded);
    for (size_t i = 0; i < rounded.size(); ++i) {
      // O has 16 bits in two halves.
      EXPECT_NEAR(rounded[i], exact[i], std::abs(exact[i]) * 0x1p-8 + 1e-3) << i;
    }
  }

  void run_jvp(const TangentKernels<T>& kernels, const JvpParams<T>& jvp) const {
    const auto prepared = memory(s_.kv_heads * kernels.jvp_prepared_bytes(jvp));
    for (int64_t head = 0; head < s_.kv_heads; ++head) {
      kernels.prepare_jvp(jvp, head, prepared.get());
    }
    const auto scratch = memory(kernels.jvp_scratch_bytes(jvp));
    for (int64_t unit = 0; unit < kernels.jvp_units(jvp); ++unit) {
      kernels.jvp(jvp, prepared.get(), unit, scratch.get());
    }
  }

  /// The derivatives of forward and backward along all directions. Returns what the former's were
  /// computed from.
  JvpParams<T> run_tangents(const TangentKernels<T>& kernels, const BackwardParams<T>& backward) {
    const bool in_16_bits = backward.problem.key_value_storage != Storage::kSame;
    out_t_.resize(out_.size());
    lse_t_.resize(lse_.size());
    dq_t_.resize(q_.size());
    dk_t_.resize(k_.size());
    dv_t_.resize(v_.size());

    JvpParams<T> jvp{};
    jvp.problem = backward.problem;
    jvp.directions.query = operand<const T>(q_t_.data(), s_.queries, s_.head_dim);
    jvp.directions.key = operand<const T>(k_t_.data(), s_.keys, s_.head_dim);
    jvp.directions.value = operand<const T>(v_t_.data(), s_.keys, s_.value_dim);
    if (in_16_bits) {
      jvp.directions.query.data = pointer(q_t16_);
      jvp.directions.key.data = pointer(k_t16_);
      jvp.directions.value.data = pointer(v_t16_);
    }
    if (s_.options) {
      jvp.directions.alibi_slopes.data = slopes_t_.data();
      jvp.directions.alibi_slopes.head_stride = 1;
      jvp.directions.sinks.data = sinks_t_.data();
      jvp.directions.sinks.head_stride = 1;
    }
    jvp.out = backward.out;
    jvp.lse = lse_.data();
    jvp.lse_rest = lse_rest_.data();
    jvp.out_t = operand<T>(out_t_.data(), s_.queries, s_.value_dim);
    jvp.lse_t = lse_t_.data();
    run_jvp(kernels, jvp);

    BackwardBackwardParams<T> second{};
    second.backward = backward;
    results_go_to(second.backward, dq_t_, dk_t_, dv_t_);
    std::vector<uint16_t> dq(q_.size()), dk(k_.size()), dv(v_.size());
    if (in_16_bits) {
      second.backward.grad_query.data = pointer(dq);
      second.backward.grad_key.data = pointer(dk);
      second.backward.grad_value.data = pointer(dv);
    }
    second.directions = jvp.directions;
    second.out_t = operand<const T>(out_t_.data(), s_.queries, s_.value_dim);
    second.lse_t = lse_t_.data();
    SecondOrderParams<T> params{second, jvp, /*splits=*/backward.splits, nullptr, nullptr};
    const auto prepared = memory(s_.kv_heads * kernels.second_order_prepared_bytes(params));
    const auto partial =
        memory(s_.kv_heads * kernels.second_order_partial_size(params) * sizeof(T));
    params.prepared = prepared.get();
    params.partial = static_cast<T*>(partial.get());
    for (int64_t head = 0; head < s_.kv_heads; ++head) {
      kernels.prepare_second_order(params, head, prepared.get());
    }
    run_splits(params, params.splits, kernels.sum_keys_units(params),
               kernels.second_order_scratch_bytes(params), kernels.second_order, kernels.sum_keys);
    if (!in_16_bits) return jvp;
    widen(dq, dq_t_);
    widen(dk, dk_t_);
    widen(dv, dv_t_);
    return jvp;
  }

  const CpuKernels<T>& kernels_;
  Shape s_;
  std::vector<uint16_t> q16_, k16_, v16_, g16_, q_t16_, k_t16_, v_t16_;
  std::vector<T> q_, k_, v_, g_, slopes_, sinks_, out_, lse_, lse_rest_, dq_, dk_, dv_;
  std::vector<T> q_t_, k_t_, v_t_, slopes_t_, sinks_t_, out_t_, lse_t_, dq_t_, dk_t_, dv_t_;
  std::vector<T> far_k_, far_v_;
};

}  // namespace kernel_run
