// A random small call from the bytes that libFuzzer makes up: every option, layout and dtype, sizes
// from 0, NaN and inf wherever nobody may see them, and now and then a wrong argument. Output,
// logsumexp and gradients are compared with the definition in float64, on the same numbers without
// the NaN.
//
// An input that fails is written to crash-*; fuzz_attention crash-... runs it once more.

#include <ATen/ATen.h>
#include <fuzzer/FuzzedDataProvider.h>
#include <qkv/qkv.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <vector>

#include "arguments.h"
#include "reference.h"

namespace {

using at::Tensor;
using qkv::Arguments;
using qkv::OptionalTensor;
using Shape = std::vector<int64_t>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Shape joined(Shape front, std::initializer_list<int64_t> back) {
  front.insert(front.end(), back);
  return front;
}

class Fuzz {
 public:
  Fuzz(const uint8_t* bytes, size_t size) : data_(bytes, size) {}

  int64_t number(int64_t low, int64_t high) {
    return data_.ConsumeIntegralInRange<int64_t>(low, high);
  }
  double real(double low, double high) { return data_.ConsumeFloatingPointInRange(low, high); }
  bool one_in(int64_t n) { return number(0, n - 1) == n - 1; }

  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[number(0, static_cast<int64_t>(choices.size()) - 1)];
  }

  /// `shape`, some of it 1.
  Shape broadcast(Shape shape) {
    for (int64_t& size : shape) {
      if (one_in(3)) size = 1;
    }
    return shape;
  }

  /// Normal numbers, sometimes constant along a dimension.
  Tensor normal(Shape shape, at::ScalarType type) {
    const Shape full = shape;
    if (one_in(6)) shape[number(0, static_cast<int64_t>(shape.size()) - 1)] = 1;
    return at::randn(shape).to(type).expand(full).contiguous();
  }

  Tensor mask(const Shape& shape) { return at::rand(shape) < one_of({0.1, 0.5, 0.9}); }

  /// x as it may lie in memory: in another order, with gaps of other numbers, or expanded.
  Tensor laid_out(const Tensor& x) {
    const int64_t a = number(0, x.dim() - 1), b = number(0, x.dim() - 1);
    switch (number(0, 3)) {
      case 1:
        return x.transpose(a, b).contiguous().transpose(a, b);
      case 2:
        return at::stack({x, at::full_like(x, std::numeric_limits<double>::quiet_NaN())}, a + 1)
            .select(a + 1, 0);
      case 3:
        if (x.size(a) > 1 && x.eq(x.narrow(a, 0, 1)).all().item<bool>()) {
          return x.narrow(a, 0, 1).expand(x.sizes());
        }
        return x;
      default:
        return x;
    }
  }

 private:
  FuzzedDataProvider data_;
};

/// query, key, value and, where there are any, numbers of mask, slopes and sinks.
std::vector<std::pair<const char*, Tensor*>> differentiable(Arguments& a) {
  std::vector<std::pair<const char*, Tensor*>> found = {
      {"query", &a.query}, {"key", &a.key}, {"value", &*a.value}};
  if (a.attn_mask && a.attn_mask->is_floating_point()) found.push_back({"mask", &*a.attn_mask});
  if (a.alibi_slopes) found.push_back({"slopes", &*a.alibi_slopes});
  if (a.sinks) found.push_back({"sinks", &*a.sinks});
  return found;
}

struct Problem {
  Arguments arguments;
  Tensor grad_out, grad_lse;  // float64
  Tensor empty_rows;          // (batch.., Hq, M)
  Tensor hidden_keys;         // (key's batch.., Hkv, N): kept by no row
};

Problem random_problem(Fuzz& fuzz) {
  const auto type = fuzz.one_of({at::kDouble, at::kFloat, at::kBFloat16, at::kHalf});
  Shape batch, kv_batch;
  for (int64_t rank = fuzz.number(0, 2); rank > 0; --rank) batch.push_back(fuzz.number(0, 2));
  for (int64_t size : batch) kv_batch.push_back(fuzz.one_in(3) ? 1 : size);
  const int64_t kv_heads = fuzz.number(1, 2), heads = kv_heads * fuzz.number(1, 3);
  const int64_t rows = fuzz.one_of<int64_t>({0, 1, 2, 3, 5, 18, 50});
  const int64_t keys = fuzz.one_of<int64_t>({0, 1, 2, 3, 7, 18, 97, 1030});
  const int64_t width = fuzz.number(0, 18), value_width = fuzz.number(0, 18);

  Problem p;
  Arguments& a = p.arguments;
  a.query = fuzz.normal(joined(batch, {heads, rows, width}), type);
  a.key = fuzz.normal(joined(kv_batch, {kv_heads, keys, width}), type);
  a.value = fuzz.normal(joined(kv_batch, {kv_heads, keys, value_width}), type);
  p.grad_out = fuzz.normal(joined(batch, {heads, rows, value_width}), type).to(at::kDouble);
  p.grad_lse = fuzz.normal(joined(batch, {heads, rows}), at::kFloat).to(at::kDouble);
  a.enable_gqa = true;
  a.is_causal = fuzz.one_in(2);
  if (fuzz.one_in(3)) a.window = {fuzz.number(-1, 20), fuzz.number(-1, 20)};
  if (fuzz.one_in(2)) a.query_offset = fuzz.number(-60, 1100);
  if (fuzz.one_in(4)) a.scale = fuzz.real(-2, 2);
  if (fuzz.one_in(4)) a.softcap = fuzz.real(0.05, 20);
  if (fuzz.one_in(4)) a.dropout_p = fuzz.real(0, 1);
  const auto extra_type = fuzz.one_in(2) && type != at::kDouble ? at::kFloat : type;
  if (fuzz.one_in(2)) {
    const Shape shape = fuzz.broadcast(joined(batch, {heads, rows, keys}));
    a.attn_mask = fuzz.mask(shape);
    if (fuzz.one_in(2)) {
      a.attn_mask = fuzz.normal(shape, extra_type).masked_fill(~*a.attn_mask, -kInfinity);
    }
  }
  if (fuzz.one_in(3)) a.key_mask = fuzz.mask(fuzz.broadcast(joined(batch, {keys})));
  for (OptionalTensor* x : {&a.alibi_slopes, &a.sinks}) {
    if (fuzz.one_in(3)) *x = fuzz.normal(joined(fuzz.broadcast(batch), {heads}), extra_type).abs();
  }

  const Tensor keep = qkv::reference::kept_pairs(qkv::checked_call("fuzz", a).operands)
                          .expand(joined(batch, {heads, rows, keys}));
  p.empty_rows = ~keep.any(-1);
  p.hidden_keys = ~keep.reshape(joined(batch, {kv_heads, heads / kv_heads * rows, keys})).any(-2);
  for (size_t d = 0; d < batch.size(); ++d) {
    if (kv_batch[d] != batch[d]) p.hidden_keys = p.hidden_keys.all(d, /*keepdim=*/true);
  }
  return p;
}

/// The arguments with something non-finite wherever nobody may see it, in any layout.
Arguments disguised(Fuzz& fuzz, const Problem& p) {
  Arguments a = p.arguments;
  const double poison = fuzz.one_of({0.0, std::nan(""), kInfinity, -kInfinity});
  if (poison != 0.0) {
    const auto fill = [&](const Tensor& x, const Tensor& rows) {
      return x.masked_fill(rows.unsqueeze(-1), poison);
    };
    a.query = fill(a.query, p.empty_rows);
    a.key = fill(a.key, p.hidden_keys);
    a.value = fill(*a.value, p.hidden_keys);
  }
  for (auto& [name, x] : differentiable(a)) *x = fuzz.laid_out(*x).detach().requires_grad_();
  if (a.attn_mask && !a.attn_mask->is_floating_point()) a.attn_mask = fuzz.laid_out(*a.attn_mask);
  if (a.key_mask) a.key_mask = fuzz.laid_out(*a.key_mask);
  return a;
}

qkv::AttentionOptions options_of(const Arguments& a) {
  qkv::AttentionOptions options;
  options.attn_mask(a.attn_mask).dropout_p(a.dropout_p).is_causal(a.is_causal).scale(a.scale);
  options.enable_gqa(a.enable_gqa).softcap(a.softcap).alibi_slopes(a.alibi_slopes).sinks(a.sinks);
  options.key_mask(a.key_mask);
  if (a.window) {
    options.window((*a.window)[0].expect_int(), (*a.window)[1].expect_int());
  }
  if (a.query_offset) options.query_offset(a.query_offset->expect_int());
  return options;
}

using Results = std::vector<std::pair<std::string, Tensor>>;

/// Output and logsumexp as they are, and gradients of both.
Results with_gradients(Arguments a, const Tensor& out, const Tensor& lse, const Problem& p) {
  std::vector<Tensor> leaves;
  for (const auto& [name, x] : differentiable(a)) leaves.push_back(*x);
  const Tensor grad_lse = p.grad_lse.masked_fill(lse.isinf(), 0.0);
  const auto grads = torch::autograd::grad(
      {out, lse}, leaves, {p.grad_out.to(out.scalar_type()), grad_lse.to(lse.scalar_type())},
      /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
  Results results = {{"output", out.detach()}, {"logsumexp", lse.detach()}};
  for (size_t i = 0; i < leaves.size(); ++i) {
    const Tensor grad = grads[i].defined() ? grads[i] : at::zeros_like(leaves[i]);
    results.push_back({std::string("gradient of ") + differentiable(a)[i].first, grad});
  }
  return results;
}

Results reference(const Problem& p, int64_t seed) {
  Arguments a = p.arguments;
  for (auto& [name, x] : differentiable(a)) *x = x->to(at::kDouble).detach().requires_grad_();
  qkv::Operands operands = qkv::checked_call("fuzz", a).operands;
  if (a.dropout_p > 0.0) {  // as the operator draws it
    const auto sizes = operands.query.sizes();
    at::manual_seed(seed);
    operands.dropout_seed = at::randint(std::numeric_limits<int64_t>::max(),
                                        sizes.slice(0, sizes.size() - 3), at::kLong);
  }
  const auto [out, lse] = qkv::reference::attention(operands);
  return with_gradients(a, out, lse, p);
}

Results fused(const Arguments& a, const Problem& p, int64_t seed) {
  at::manual_seed(seed);
  const auto [out, lse] = qkv::attention_with_lse(a.query, a.key, *a.value, options_of(a));
  return with_gradients(a, out, lse, p);
}

/// How far results may be apart, relative to the largest number: a rounding of a score is an error
/// in the exponent of a weight. (test_fuzz.py has sharper bounds for 16 bits.)
double tolerance(const Arguments& a) {
  const auto largest = [](const Tensor& x) {
    return x.numel() == 0 ? 0.0 : x.to(at::kDouble).norm(2, -1).max().item<double>();
  };
  const double positions = static_cast<double>(a.query.size(-2) + a.key.size(-2)) + 1100.0;
  double score = std::abs(a.scale.value_or(1.0)) * largest(a.query) * largest(a.key);
  if (a.alibi_slopes) score += largest(a.alibi_slopes->unsqueeze(-1)) * positions;
  const double factor = std::max(1.0, score / 16);
  switch (a.query.scalar_type()) {
    case at::kDouble:
      return 2e-13 * factor;
    case at::kFloat:
      return 3e-5 * factor;
    case at::kHalf:
      return 8e-3 + 3e-5 * factor;
    default:
      return 6e-2 + 3e-5 * factor;
  }
}

bool near(const Results& found, const Results& expected, double tolerance) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& [name, e] = expected[i];
    const Tensor f = found[i].second.to(at::kDouble);
    const double scale =
        e.numel() == 0 ? 1.0
                       : std::max(1.0, e.masked_fill(e.isinf(), 0.0).abs().max().item<double>());
    if (f.sizes() == e.sizes() && at::allclose(f, e, /*rtol=*/0.0, /*atol=*/tolerance * scale)) {
      continue;
    }
    std::cerr << name << " is wrong, within " << tolerance * scale << ". Found:\n"
              << f << "\nexpected:\n"
              << e << '\n';
    return false;
  }
  return true;
}

std::string shape_and_type(const Tensor& x) {
  return c10::str(x.sizes(), " strides ", x.strides(), ' ', x.scalar_type());
}

void print(Arguments a) {
  for (const auto& [name, x] : differentiable(a)) {
    std::cerr << name << ' ' << shape_and_type(*x) << '\n';
  }
  if (a.attn_mask) std::cerr << "attn_mask " << shape_and_type(*a.attn_mask) << '\n';
  if (a.key_mask) std::cerr << "key_mask " << shape_and_type(*a.key_mask) << '\n';
  std::cerr << "causal " << a.is_causal << ", offset " << a.query_offset.value_or(0) << ", window ";
  if (a.window) std::cerr << (*a.window)[0] << ' ' << (*a.window)[1];
  std::cerr << ", scale " << a.scale.value_or(0.0) << ", softcap " << a.softcap << ", dropout "
            << a.dropout_p << '\n';
}

/// One argument spoilt: whatever happens, it is an error of c10 or a result.
void call_wrongly(Fuzz& fuzz, Arguments a) {
  std::vector<Tensor*> tensors = {&a.query, &a.key, &*a.value};
  for (OptionalTensor* x : {&a.attn_mask, &a.key_mask, &a.alibi_slopes, &a.sinks}) {
    if (*x) tensors.push_back(&**x);
  }
  Tensor& x = *tensors[fuzz.number(0, static_cast<int64_t>(tensors.size()) - 1)];
  x = x.detach();
  const int64_t d = fuzz.number(0, x.dim() - 1);
  try {
    switch (fuzz.number(0, 6)) {
      case 0:
        x = x.to(fuzz.one_of({at::kLong, at::kBool, at::kFloat, at::kHalf}));
        break;
      case 1:
        x = x.select(d, 0);
        break;
      case 2:
        x = x.unsqueeze(d);
        break;
      case 3:
        x = x.narrow(d, 0, x.size(d) / 2);
        break;
      case 4:
        x = at::cat({x, x}, d);
        break;
      case 5:
        a.window = {fuzz.number(-5, 5), fuzz.number(-5, 5)};
        break;
      default:
        a.scale = fuzz.one_of({kInfinity, std::nan(""), 1e300});
    }
    qkv::attention(a.query, a.key, *a.value, options_of(a));
  } catch (const c10::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Fuzz fuzz(bytes, size);
  const int64_t seed = fuzz.number(0, 255);
  at::manual_seed(seed);
  const Problem problem = random_problem(fuzz);
  const Arguments arguments = disguised(fuzz, problem);
  if (fuzz.one_in(16)) {
    call_wrongly(fuzz, arguments);
    return 0;
  }
  if (!near(fused(arguments, problem, seed), reference(problem, seed),
            tolerance(problem.arguments))) {
    print(arguments);
    std::abort();
  }
  return 0;
}
