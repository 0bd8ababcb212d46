// The kernels by themselves, without torch: every instruction set that this processor has, and with
// AVX2 those of AVX-512 in software, against loops in double. (Through the operator, the other
// tests only see the one that is chosen.)

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "dual.h"
#include "kernels/cpu/isa.h"

#if defined(QKV_EMULATES_AVX512)
// Compiled for AVX2, with what that lacks in software (tests/avx512_emulation,
// tests/amx_emulation).
namespace qkv::kernels {
namespace avx512_emulated {
extern const CpuKernelTable table;
}
namespace avx512_bf16_emulated {
extern const CpuKernelTable table;
extern const char* wrong_instruction();
}  // namespace avx512_bf16_emulated
namespace avx512_amx_emulated {
extern const CpuKernelTable table;
}
namespace avx512_bf16 {
extern const char* wrong_instruction();
}
}  // namespace qkv::kernels
#endif

namespace {

using namespace qkv::kernels;

struct Emulated {
  std::string name;
  const CpuKernelTable* table;
};
const std::vector<Emulated> kEmulated = {
#if defined(QKV_EMULATES_AVX512)
    {"avx512_emulated", &avx512_emulated::table},
    {"avx512_bf16_emulated", &avx512_bf16_emulated::table},
    {"avx512_amx_emulated", &avx512_amx_emulated::table},
#endif
};

template <class T>
const CpuKernels<T>& kernels_of(const CpuKernelTable& table) {
  if constexpr (sizeof(T) == 4) {
    return table.float32;
  } else {
    return table.float64;
  }
}

struct Shape {
  int64_t heads, kv_heads, queries, keys, head_dim, value_dim;
  Band band;
  bool options = false;  // softcap, ALiBi and sinks
  bool capped = false;   // a softcap alone
  bool drops = false;    // a quarter of the weights

  bool has_softcap() const { return options || capped; }
};

constexpr double kSoftcap = 1.5;
constexpr int64_t kSeed = 0x123456789abcdef;

/// The largest differences to loops in double.
struct Errors {
  double output = 0.0, lse = 0.0, gradients = 0.0;
  double along = 0.0;  // of the derivatives of outputs and gradients along the directions

  double largest() const { return std::max({output, lse, gradients, along}); }
};

/// The upper half of a float, and what is left of the float.
uint16_t bfloat16_of(float& x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits &= 0xffff0000;
  std::memcpy(&x, &bits, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

/// Kernels that read bfloat16, to be run instead of others or after them.
struct OfBFloat16 {
  const BFloat16ForwardKernels* forward = nullptr;
  const BFloat16BackwardKernels* backward = nullptr;
  const BFloat16TangentKernels* tangents = nullptr;
};

/// One problem in dense tensors, run unit by unit.
template <class T>
class KernelRun {
 public:
  KernelRun(const CpuKernelTable& table, const Shape& shape, int64_t splits,
            const OfBFloat16& of_bfloat16 = {})
      : kernels_(kernels_of<T>(table)), s_(shape) {
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

    Problem<T> p{};
    p.batch = 1;
    p.query_heads = s_.heads;
    p.kv_heads = s_.kv_heads;
    p.queries = s_.queries;
    p.keys = s_.keys;
    p.head_dim = s_.head_dim;
    p.value_dim = s_.value_dim;
    p.scale = T(0.3);
    p.band = s_.band;
    p.query = operand<const T>(q_.data(), s_.queries, s_.head_dim);
    p.key = operand<const T>(k_.data(), s_.keys, s_.head_dim);
    p.value = operand<const T>(v_.data(), s_.keys, s_.value_dim);
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

    const ForwardKernels<T>* forward_kernels = &kernels_;
    ForwardParams<T> forward{};
    if constexpr (sizeof(T) == 4) {
      if (of_bfloat16.forward != nullptr || of_bfloat16.backward != nullptr) {
        const auto store = [](std::vector<T>& from, std::vector<uint16_t>& to) {
          for (T& x : from) to.push_back(bfloat16_of(x));
        };
        store(q_, q16_);
        store(k_, k16_);
        store(v_, v16_);
        store(g_, g16_);
        store(q_t_, q_t16_);
        store(k_t_, k_t16_);
        store(v_t_, v_t16_);
      }
      if (of_bfloat16.forward != nullptr && of_bfloat16.forward->takes(p)) {
        forward_kernels = of_bfloat16.forward;
        p.query.data = reinterpret_cast<const T*>(q16_.data());
        p.key.data = reinterpret_cast<const T*>(k16_.data());
        p.value.data = reinterpret_cast<const T*>(v16_.data());
        p.key_value_storage = Storage::kBFloat16;
      }
    }
    forward.problem = p;
    forward.out = operand<T>(out_.data(), s_.queries, s_.value_dim);
    forward.lse = lse_.data();
    forward.lse_rest = lse_rest_.data();
    const int64_t prepared_bytes = forward_kernels->forward_prepared_bytes(forward);
    const auto prepared = memory(prepared_bytes);
    forward.prepared = prepared.get();
    for (int64_t head = 0; prepared_bytes > 0 && head < s_.kv_heads; ++head) {
      forward_kernels->prepare_forward(forward, head);
    }
    const int64_t parts = forward_kernels->forward_partial_size(forward);
    const auto forward_partial = memory(parts * sizeof(T));
    forward.partial = static_cast<T*>(forward_partial.get());
    const auto run_forward = [&](int64_t in_turn) {
      const auto scratch = memory(forward_kernels->forward_scratch_bytes(forward, in_turn));
      const int64_t units = forward_kernels->forward_units(forward, in_turn);
      for (int64_t unit = 0; unit < units; ++unit) {
        forward_kernels->forward(forward, in_turn, unit, scratch.get());
      }
      for (int64_t head = 0; parts > 0 && head < s_.kv_heads; ++head) {
        forward_kernels->merge_forward(forward, head);
      }
    };
    run_forward(1);
    {  // tiles that take turns leave the same bits
      const auto out = out_, lse = lse_;
      out_.assign(out.size(), std::numeric_limits<T>::quiet_NaN());
      lse_.assign(lse.size(), std::numeric_limits<T>::quiet_NaN());
      run_forward(3);
      EXPECT_EQ(0, std::memcmp(out.data(), out_.data(), out.size() * sizeof(T)));
      EXPECT_EQ(0, std::memcmp(lse.data(), lse_.data(), lse.size() * sizeof(T)));
    }
    p.query.data = q_.data();
    p.key.data = k_.data();
    p.value.data = v_.data();
    p.key_value_storage = Storage::kSame;

    BackwardParams<T> backward{};
    backward.problem = p;
    backward.grad_out = operand<const T>(g_.data(), s_.queries, s_.value_dim);
    backward.out = operand<const T>(out_.data(), s_.queries, s_.value_dim);
    backward.lse = lse_.data();
    backward.lse_rest = lse_rest_.data();
    results_go_to(backward, dq_, dk_, dv_);
    backward.splits = splits;
    const auto partial =
        memory(s_.kv_heads * kernels_.partial_grad_query_size(backward) * sizeof(T));
    backward.partial_grad_query = static_cast<T*>(partial.get());
    run_splits(backward, splits, kernels_.backward_row_tiles(p),
               kernels_.backward_scratch_bytes(backward), kernels_.backward,
               kernels_.sum_grad_query);
    run_tangents(kernels_, backward);
    if constexpr (sizeof(T) == 4) {
      if (of_bfloat16.backward != nullptr) run_in_bfloat16(of_bfloat16, backward);
    }
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
          score = score * double(T(0.3));
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
          const Dual ds = p[j] * (dp[j] - delta) * cap_slope[j] * double(T(0.3));
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
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static std::unique_ptr<void, Free> memory(int64_t bytes) {
    // Of exactly this size, so that a sanitizer sees an overrun; full of NaN, so that what is read
    // before it is written shows.
    void* p = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::memset(p, 0xff, (bytes + 63) / 64 * 64);
    return std::unique_ptr<void, Free>(p);
  }

  template <class U>
  static Operand<U> operand(U* data, int64_t rows, int64_t width) {
    Operand<U> x{};
    x.data = data;
    x.head_stride = rows * width;
    x.row_stride = width;
    x.column_stride = 1;
    return x;
  }

  void results_go_to(BackwardParams<T>& backward, std::vector<T>& dq, std::vector<T>& dk,
                     std::vector<T>& dv) {
    backward.grad_query = operand<T>(dq.data(), s_.queries, s_.head_dim);
    backward.grad_key = operand<T>(dk.data(), s_.keys, s_.head_dim);
    backward.grad_value = operand<T>(dv.data(), s_.keys, s_.value_dim);
  }

  /// All splits of all heads, then the sums of what they left.
  template <class Params>
  void run_splits(const Params& params, int64_t splits, int64_t sum_units, int64_t scratch_bytes,
                  void (*run)(const Params&, int64_t, int64_t, void*),
                  void (*sum)(const Params&, int64_t, int64_t, void*)) {
    const auto scratch = memory(scratch_bytes);
    for (int64_t unit = 0; unit < s_.kv_heads * splits; ++unit) {
      run(params, 0, unit, scratch.get());
    }
    for (int64_t unit = 0; splits > 1 && unit < s_.kv_heads * sum_units; ++unit) {
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
  void run_in_bfloat16(const OfBFloat16& of_bfloat16, BackwardParams<float> backward) {
    const BFloat16BackwardKernels& kernels = *of_bfloat16.backward;
    ASSERT_TRUE(kernels.takes(backward.problem));
    backward.problem.query.data = pointer(q16_);
    backward.problem.key.data = pointer(k16_);
    backward.problem.value.data = pointer(v16_);
    backward.problem.key_value_storage = Storage::kBFloat16;
    backward.grad_out.data = pointer(g16_);
    // The rest of an output is what its upper half lacks; the rest of that does not matter.
    std::vector<uint16_t> out, rest, dq(q_.size()), dk(k_.size()), dv(v_.size());
    for (T x : out_) {
      T upper = x;
      out.push_back(bfloat16_of(upper));
      T left = x - upper;
      rest.push_back(bfloat16_of(left));
    }
    backward.out.data = pointer(out);
    backward.out_rest = backward.out;
    backward.out_rest.data = pointer(rest);
    backward.grad_query.data = pointer(dq);
    backward.grad_key.data = pointer(dk);
    backward.grad_value.data = pointer(dv);
    const auto partial =
        memory(s_.kv_heads * kernels.partial_grad_query_size(backward) * sizeof(T));
    backward.partial_grad_query = static_cast<T*>(partial.get());
    run_splits(backward, backward.splits, kernels.backward_row_tiles(backward.problem),
               kernels.backward_scratch_bytes(backward), kernels.backward, kernels.sum_grad_query);
    widen(dq, dq_);
    widen(dk, dk_);
    widen(dv, dv_);
    backward.out = operand<const T>(out_.data(), s_.queries, s_.value_dim);
    backward.out_rest = {};
    ASSERT_TRUE(of_bfloat16.tangents->takes(backward.problem));
    run_tangents(*of_bfloat16.tangents, backward);
  }

  /// The derivatives of forward and backward along all directions.
  void run_tangents(const TangentKernels<T>& kernels, const BackwardParams<T>& backward) {
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
    const auto jvp_prepared = memory(s_.kv_heads * kernels.jvp_prepared_bytes(jvp));
    for (int64_t head = 0; head < s_.kv_heads; ++head) {
      kernels.prepare_jvp(jvp, head, jvp_prepared.get());
    }
    const auto jvp_scratch = memory(kernels.jvp_scratch_bytes(jvp));
    for (int64_t unit = 0; unit < kernels.jvp_units(jvp); ++unit) {
      kernels.jvp(jvp, jvp_prepared.get(), unit, jvp_scratch.get());
    }

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
    if (!in_16_bits) return;
    widen(dq, dq_t_);
    widen(dk, dk_t_);
    widen(dv, dv_t_);
  }

  const CpuKernels<T>& kernels_;
  Shape s_;
  std::vector<uint16_t> q16_, k16_, v16_, g16_, q_t16_, k_t16_, v_t16_;
  std::vector<T> q_, k_, v_, g_, slopes_, sinks_, out_, lse_, lse_rest_, dq_, dk_, dv_;
  std::vector<T> q_t_, k_t_, v_t_, slopes_t_, sinks_t_, out_t_, lse_t_, dq_t_, dk_t_, dv_t_;
};

class Kernels : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string isa = GetParam();
    auto chosen = choose_cpu_kernels(isa.c_str());
    for (const Emulated& emulated : kEmulated) {
      if (isa == emulated.name) chosen = {choose_cpu_kernels("avx2").choice, emulated.table};
    }
    if (chosen.choice != IsaChoice::kFound) GTEST_SKIP() << "not on this processor";
    table_ = chosen.table;
  }

  const CpuKernelTable* table_ = nullptr;
};

TEST_P(Kernels, EqualLoopsInDouble) {
  if (table_->bfloat16_forward != nullptr) GTEST_SKIP() << "has those of AVX-512";
  const Band all{-1, -1, 0}, causal{-1, 0, 0}, window{9, 3, 11}, outside{2, 2, -500};
  const Shape shapes[] = {
      {1, 1, 1, 1, 1, 1, all},
      {2, 2, 5, 7, 3, 4, all},
      {1, 1, 17, 33, 8, 8, causal},
      {1, 1, 50, 300, 20, 17, all},
      {2, 1, 100, 290, 16, 33, causal},
      {6, 2, 40, 200, 31, 64, causal},
      {4, 2, 60, 90, 24, 80, window},
      {1, 1, 30, 20, 5, 5, outside},
      {1, 1, 49, 97, 65, 63, causal},
      {3, 1, 33, 129, 48, 1, window},
      // Few rows: other kernels, and with many keys several ranges of them.
      {2, 2, 1, 2100, 33, 70, all},
      {4, 1, 1, 2100, 16, 5, window},
      {3, 1, 1, 40, 7, 64, all},
      {2, 1, 1, 3000, 8, 16, outside},
      {1, 1, 30, 2500, 9, 20, all},
      {1, 1, 2, 300, 64, 64, all, true},
      {4, 2, 60, 290, 24, 20, all, true},
      {2, 1, 20, 2100, 8, 8, causal, true},
      // Scores are capped where they leave their product.
      {1, 1, 50, 400, 20, 17, all, false, true},
      {2, 1, 70, 290, 24, 20, {-1, 0, 200}, false, true},
      {2, 1, 35, 4200, 9, 20, {-1, 0, 4170}},  // two tiles or three of 48 or 24 rows
      {1, 1, 45, 4200, 5, 8, {2100, 40, 0}},
      // Many bytes a key: tiles take turns more than once.
      {1, 1, 70, 400, 64, 300, {-1, 0, 330}},
      // More keys than second order keeps weights of.
      {2, 1, 3, 16500, 4, 5, {16470, 0, 16480}},
  };
  for (const Shape& shape : shapes) {
    for (int64_t splits : {1, 2, 3}) {
      if (splits > (shape.keys + 95) / 96) continue;
      const std::string what = "heads " + std::to_string(shape.heads) + " queries " +
                               std::to_string(shape.queries) + " keys " +
                               std::to_string(shape.keys) + " splits " + std::to_string(splits);
      EXPECT_LT((KernelRun<float>(*table_, shape, splits).errors().largest()), 5e-5) << what;
      EXPECT_LT((KernelRun<double>(*table_, shape, splits).errors().largest()), 5e-13) << what;
    }
  }
}

TEST_P(Kernels, DropTheSameWeights) {
  if (table_->bfloat16_forward != nullptr) GTEST_SKIP() << "has those of AVX-512";
  const Shape shape{2, 1, 50, 200, 8, 12, {-1, 0, 150}, false, false, true};
  const auto dropped = KernelRun<float>(*table_, shape, 2).results();
  const auto expected = KernelRun<float>(*choose_cpu_kernels("generic").table, shape, 2).results();
  const auto all = KernelRun<float>(*table_, {2, 1, 50, 200, 8, 12, {-1, 0, 150}}, 2).results();
  double error = 0.0, difference = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error = std::max(error, std::abs(double(dropped[i]) - double(expected[i])));
    difference = std::max(difference, std::abs(double(dropped[i]) - double(all[i])));
  }
  EXPECT_LT(error, 5e-5);
  EXPECT_GT(difference, 0.1);
}

TEST_P(Kernels, ProductsInBFloat16) {
  if (table_->bfloat16_forward == nullptr) GTEST_SKIP() << "has none";
  const Band all{-1, -1, 0}, causal{-1, 0, 0}, window{9, 3, 11};
  const Shape shapes[] = {
      {1, 1, 17, 33, 8, 8, causal},
      {1, 1, 50, 300, 20, 17, all},
      {2, 1, 100, 291, 16, 33, causal},
      {6, 2, 40, 200, 34, 64, causal},
      {4, 2, 60, 90, 24, 80, window},
      {1, 1, 49, 97, 66, 63, causal},
      {1, 1, 30, 2501, 10, 20, all},            // ranges of keys
      {2, 1, 35, 4201, 10, 20, {-1, 0, 4170}},  // of several tiles
      {4, 2, 60, 290, 24, 20, all, true},
      {2, 1, 20, 2100, 8, 8, causal, true},
      {1, 1, 170, 409, 64, 300, {-1, 0, 239}},  // several turns
  };
  for (const Shape& shape : shapes) {
    const auto errors = KernelRun<float>(*table_, shape, 1, {table_->bfloat16_forward}).errors();
    const std::string what =
        "queries " + std::to_string(shape.queries) + " keys " + std::to_string(shape.keys);
    // A weight is rounded by up to 2^-9, values are up to 4: most of it averages out.
    EXPECT_LT(errors.output, 1.5e-2) << what;
    EXPECT_LT(errors.along, 1.5e-2) << what;
    EXPECT_LT(errors.lse, 5e-5) << what;
  }
}

TEST_P(Kernels, OneKeyIsMoreThanATurn) {
  if (table_->bfloat16_forward != nullptr) GTEST_SKIP() << "has those of AVX-512";
  const Shape shape{1, 1, 65, 3, 1, 68000, {-1, -1, 0}};
  EXPECT_LT((KernelRun<float>(*table_, shape, 1).errors().output), 5e-5);
}

/// As in decoding: by pairs where there are instructions for them, else converted.
TEST_P(Kernels, FewRowsOfBFloat16) {
  const BFloat16ForwardKernels converting{table_->float32, [](const auto&) { return true; }};
  const Band all{-1, -1, 0}, causal{-1, 0, 299}, window{70, 3, 211};
  const Shape shapes[] = {
      {1, 1, 1, 300, 64, 64, all},          {4, 1, 1, 290, 72, 80, all},
      {2, 1, 2, 301, 33, 7, causal},        {1, 1, 3, 301, 31, 7, window},
      {6, 2, 1, 2300, 40, 24, all},         {4, 1, 1, 300, 1, 9, all},
      {4, 1, 1, 290, 72, 80, causal, true},
  };
  for (const Shape& shape : shapes) {
    for (const auto* forward : {&converting, table_->bfloat16_forward}) {
      if (forward == nullptr) continue;
      const auto errors = KernelRun<float>(*table_, shape, 1, {forward}).errors();
      const std::string what = "queries " + std::to_string(shape.queries) + " keys " +
                               std::to_string(shape.keys) + " D " + std::to_string(shape.head_dim);
      EXPECT_LT(errors.output, 5e-5) << what;
      EXPECT_LT(errors.lse, 5e-5) << what;
    }
  }
}

/// By those that multiply in it, if there are any, and by those that convert it. Exact but along
/// the directions with AVX512-BF16, where tiles are rounded if there are 128 keys.
TEST_P(Kernels, DerivativesOfBFloat16) {
  const auto takes = [](const auto&) { return true; };
  const BFloat16ForwardKernels forward{table_->float32, takes};
  const BFloat16BackwardKernels backward{table_->float32, takes};
  const BFloat16TangentKernels tangents{table_->float32, takes};
  const OfBFloat16 converting{&forward, &backward, &tangents};
  const OfBFloat16 multiplying{nullptr, table_->bfloat16_backward, table_->bfloat16_tangents};
  const Band all{-1, -1, 0}, causal{-1, 0, 0}, window{9, 3, 11}, outside{2, 2, -500};
  const Shape shapes[] = {
      {1, 1, 17, 33, 8, 8, causal},
      {1, 1, 50, 300, 20, 17, all},
      {2, 1, 100, 291, 16, 33, causal},
      {6, 2, 40, 200, 34, 64, causal},
      {4, 2, 60, 90, 24, 80, window},
      {1, 1, 49, 97, 65, 63, causal},
      {3, 1, 133, 230, 1, 1, window},
      {1, 1, 32, 96, 32, 32, outside},
      {4, 2, 60, 290, 24, 20, all, true},
      {2, 1, 20, 300, 8, 8, causal, true},
      {1, 1, 170, 409, 64, 300, {-1, 0, 239}},  // several turns of a forward
  };
  for (const Shape& shape : shapes) {
    for (int64_t splits : {1, 2, 3}) {
      if (splits > (shape.keys + 95) / 96) continue;
      for (const OfBFloat16& kernels : {converting, multiplying}) {
        if (kernels.backward == nullptr) continue;
        const auto errors = KernelRun<float>(*table_, shape, splits, kernels).errors(0x1p-8);
        const std::string what = "queries " + std::to_string(shape.queries) + " keys " +
                                 std::to_string(shape.keys) + " splits " + std::to_string(splits);
        // Sums of up to 300 numbers, which are cut off at 2^-16 where AMX multiplies them.
        EXPECT_LT(errors.gradients, 2e-4) << what;
        EXPECT_LT(errors.output, 2e-4) << what;
        const bool rounds = kernels.tangents == table_->bfloat16_tangents &&
                            std::string(table_->isa) == "avx512_bf16" && shape.keys >= 128;
        EXPECT_LT(errors.along, rounds ? 0.05 : 2e-4) << what;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Kernels,
                         ::testing::Values("generic", "avx2", "avx512", "avx512_bf16", "avx512_amx",
                                           "avx512_emulated", "avx512_bf16_emulated",
                                           "avx512_amx_emulated", "neon"),
                         [](const auto& info) { return std::string(info.param); });

#if defined(QKV_EMULATES_AVX512)
TEST(Avx512, InstructionsAreEmulated) {
  if (choose_cpu_kernels("avx2").choice != IsaChoice::kFound) GTEST_SKIP() << "needs AVX2";
  EXPECT_STREQ(avx512_bf16_emulated::wrong_instruction(), nullptr);
}

TEST(Avx512, InstructionsAreThoseOfTheProcessor) {
  if (choose_cpu_kernels("avx512_bf16").choice != IsaChoice::kFound) GTEST_SKIP() << "has none";
  EXPECT_STREQ(avx512_bf16::wrong_instruction(), nullptr);
}
#endif

TEST(Isa, NamesAreChecked) {
  EXPECT_EQ(choose_cpu_kernels("sse9").choice, IsaChoice::kUnknownName);
  EXPECT_EQ(choose_cpu_kernels(nullptr).choice, IsaChoice::kFound);
  EXPECT_STREQ(choose_cpu_kernels("generic").table->isa, "generic");
}

}  // namespace
