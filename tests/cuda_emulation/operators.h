#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "cuda_emulation/device.h"
#include "cuda_emulation/memory.h"
#include "internal_op.h"

// What the tests of the operators on the emulated device share: operands in every type, what they
// are differentiated along, and how near to float64 results must be.

namespace emulation {

namespace device = qkv::kernels::device;
using torch::Tensor;
using Names = std::vector<std::string>;

inline const bool watching = [] {
  device::watch_tensors();
  return true;
}();

inline void expect_no_faults() {
  for (const auto& fault : device::take_faults()) ADD_FAILURE() << fault.text();
}

inline bool is_number(const qkv::OptionalTensor& x) { return x && x->is_floating_point(); }

inline qkv::Operands converted(qkv::Operands x, torch::ScalarType type) {
  auto tensors = x.tensors();
  for (auto& t : tensors) {
    if (!is_number(t)) continue;
    // Rounded, expanded and laid out as before.
    Tensor moved = torch::empty_strided(t->sizes(), t->strides(), t->options().dtype(type));
    if (moved.numel() > 0) {
      auto base = [](const Tensor& y) {
        Tensor once = y;
        for (int64_t d = 0; d < y.dim(); ++d) {
          if (y.stride(d) == 0) once = once.narrow(d, 0, 1);
        }
        return once;
      };
      base(moved).copy_(base(*t));
    }
    t = moved;
  }
  return x.with(tensors);
}

/// What a sample is differentiated along, in numbers that its dtype has.
struct Incoming {
  Tensor out, lse;

  explicit Incoming(const qkv::Operands& x) {
    auto sizes = x.query.sizes().vec();
    sizes.back() = x.value.size(-1);
    torch::manual_seed(2);
    const auto type = x.query.scalar_type();
    out = torch::randn(sizes, torch::kDouble).to(type).to(torch::kDouble);
    sizes.pop_back();
    lse = torch::randn(sizes, torch::kDouble);
    if (type != torch::kDouble) lse = lse.to(torch::kFloat).to(torch::kDouble);
  }
};

/// |a - b| <= relative · |b| + absolute · the largest |b|; infinities are equal.
inline void expect_near(const Tensor& actual, const Tensor& wanted, double relative,
                        double absolute, const std::string& what) {
  ASSERT_EQ(actual.sizes(), wanted.sizes()) << what;
  if (wanted.numel() == 0) return;
  const Tensor a = actual.to(torch::kDouble), b = wanted.to(torch::kDouble);
  const Tensor finite = b.isfinite();
  EXPECT_TRUE(torch::equal(a.masked_select(~finite), b.masked_select(~finite))) << what;
  const Tensor size = b.abs().masked_fill(~finite, 0.0);
  const Tensor allowed = relative * size + absolute * size.max().clamp_min(1.0);
  const Tensor error = (a - b).abs().masked_fill(~finite, 0.0);
  EXPECT_TRUE((error <= allowed).all().item<bool>())
      << what << ": off by " << (error - allowed).max().item<double>() << " more than allowed";
}

/// Several tiles of everything, and all options.
inline qkv::Operands large(int64_t batch, int64_t queries = 150, int64_t keys = 139,
                           int64_t width = 70, int64_t value_width = 133) {
  torch::manual_seed(3);
  const auto real = torch::kDouble;
  qkv::Operands x;
  x.query = torch::randn({batch, 4, queries, width}, real);
  x.key = torch::randn({batch, 2, keys, width}, real);
  x.value = torch::randn({batch, 2, keys, value_width}, real);
  x.attn_mask = torch::randn({queries, keys}, real);
  x.attn_mask->masked_fill_(torch::rand({queries, keys}) < 0.2, -INFINITY);
  x.attn_mask = x.attn_mask->expand({batch, 4, queries, keys});
  x.alibi_slopes = torch::rand({4}, real).expand({batch, 4});
  x.sinks = torch::randn({4}, real).expand({batch, 4});
  x.key_mask = torch::rand({batch, keys}) < 0.9;
  x.dropout_seed = torch::randint(1 << 30, {batch}, torch::kLong);
  x.softcap = 3.0;
  x.dropout_p = 0.25;
  x.band = {90, 10, keys - queries};
  return x;
}

/// Whole tiles without options, full and causal.
inline std::vector<qkv::Operands> plain_tiles() {
  qkv::Operands full = large(1, 128, 192, 64, 64);
  full.attn_mask = full.alibi_slopes = full.sinks = full.key_mask = full.dropout_seed =
      std::nullopt;
  full.softcap = full.dropout_p = 0.0;
  full.band = {-1, -1, 0};
  qkv::Operands causal = full;
  causal.band = {-1, 0, 64};
  return {full, causal};
}

inline std::vector<qkv::Operands> masks_of_every_broadcast_shape() {
  std::vector<qkv::Operands> all;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1, 1, 70, 90},
                                            {2, 1, 1, 90},
                                            {1, 4, 70, 1},
                                            {1, 1, 1, 1},
                                            {2, 4, 70, 90},
                                            {1, 1, 1, 90}}) {
    qkv::Operands x = large(2, 70, 90, 5, 6);
    torch::manual_seed(4);
    x.attn_mask = torch::randn(shape, torch::kDouble);
    x.band = {-1, 0, 20};
    all.push_back(x);
  }
  return all;
}

}  // namespace emulation
