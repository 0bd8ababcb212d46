#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <qkv/nn.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "checks.h"
#include "dtype_name.h"

namespace qkv::nn {

namespace {

/// Sizes with the number of keys taken out: what must agree between calls.
std::vector<int64_t> sizes_of_one_key(const at::Tensor& x) {
  auto sizes = x.sizes().vec();
  sizes[sizes.size() - 2] = 1;
  return sizes;
}

at::IntArrayRef all_sizes_but_width(const at::Tensor& x) { return x.sizes().slice(0, x.dim() - 1); }

/// An ordinary tensor in inference mode too, or the cache could not be used outside it.
at::Tensor with_room_for(int64_t max_length, const at::Tensor& x) {
  const c10::InferenceMode none(false);
  auto sizes = x.sizes().vec();
  sizes[sizes.size() - 2] = max_length;
  return at::empty(sizes, x.options());
}

bool shares_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.is_alias_of(b);
}

}  // namespace

KVCache::KVCache(int64_t max_length) : max_length_(max_length) {
  TORCH_CHECK_VALUE(max_length > 0, "qkv::KVCache: max_length must be positive, but is ",
                    max_length);
}

KVCache::KVCache(const KVCache& other) : KVCache(other.max_length_) {
  if (other.length_ == 0) return;
  const at::NoGradGuard no_grad;
  const auto [key, value] = other.cached();
  append(*key, *value);
}

std::tuple<at::Tensor, at::Tensor> KVCache::append(const at::Tensor& key, const at::Tensor& value) {
  const auto all = extended(key, value);
  advance(key.size(-2));
  return all;
}

std::tuple<at::Tensor, at::Tensor> KVCache::extended(const at::Tensor& key,
                                                     const at::Tensor& value) {
  extension_ = 0;  // until all of it is there
  check_rows_of_numbers("qkv::KVCache", "key", key);
  check_rows_of_numbers("qkv::KVCache", "value", value);
  TORCH_CHECK_VALUE(key.scalar_type() == value.scalar_type() && key.device() == value.device(),
                    "qkv::KVCache: key and value must have one dtype and one device, but are ",
                    dtype_name(key.scalar_type()), " on ", key.device(), " and ",
                    dtype_name(value.scalar_type()), " on ", value.device());
  TORCH_CHECK_VALUE(
      key.dim() >= 2 && value.dim() >= 2 && all_sizes_but_width(key) == all_sizes_but_width(value),
      "qkv::KVCache: key and value must be (.., new keys, width), of the same sizes "
      "but for the width, but have shapes ",
      key.sizes(), " and ", value.sizes());
  TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !(key.requires_grad() || value.requires_grad()),
                    "qkv::KVCache: no gradients flow through a cache; use it without grad mode "
                    "(torch.no_grad() in Python, torch::NoGradGuard in C++)");
  const int64_t count = key.size(-2);
  TORCH_CHECK_VALUE(count <= max_length_ - length_, "qkv::KVCache: there is room for ", max_length_,
                    " keys, but ", length_, " are cached and ", count, " come");
  const auto fits = [](const at::Tensor& cached, const at::Tensor& x) {
    return cached.defined() && sizes_of_one_key(cached) == sizes_of_one_key(x) &&
           cached.scalar_type() == x.scalar_type() && cached.device() == x.device();
  };
  if (!fits(key_, key) || !fits(value_, value)) {
    const auto kind = [](const at::Tensor& x) {
      return c10::str(dtype_name(x.scalar_type()), ' ', x.sizes(), " on ", x.device());
    };
    if (length_ > 0) {
      const auto [cached_key, cached_value] = cached();
      TORCH_CHECK_VALUE(false, "qkv::KVCache: cached are keys and values ", kind(*cached_key),
                        " and ", kind(*cached_value), ", which ", kind(key), " and ", kind(value),
                        " do not fit");
    }
    key_ = with_room_for(max_length_, key);
    value_ = with_room_for(max_length_, value);
  }
  const at::NoGradGuard no_grad;
  // Views of the cache may come back, as of all keys but the oldest.
  const auto apart = [&](const at::Tensor& x) {
    return shares_memory(x, key_) || shares_memory(x, value_) ? x.clone() : x;
  };
  const at::Tensor new_key = apart(key), new_value = apart(value);
  key_.narrow(-2, length_, count).copy_(new_key);
  value_.narrow(-2, length_, count).copy_(new_value);
  extension_ = count;
  return {key_.narrow(-2, 0, length_ + count), value_.narrow(-2, 0, length_ + count)};
}

void KVCache::advance(int64_t count) {
  TORCH_CHECK_VALUE(count >= 0 && count <= extension_, "qkv::KVCache: of the last extension ",
                    extension_, " keys are left to take in, so it cannot advance by ", count);
  length_ += count;
  extension_ = 0;
}

std::tuple<std::optional<at::Tensor>, std::optional<at::Tensor>> KVCache::cached() const {
  if (length_ == 0) return {std::nullopt, std::nullopt};
  return {key_.narrow(-2, 0, length_), value_.narrow(-2, 0, length_)};
}

void KVCache::truncate(int64_t length) {
  TORCH_CHECK_VALUE(length >= 0 && length <= length_, "qkv::KVCache: length must be between 0 and ",
                    length_, ", but is ", length);
  length_ = length;
  extension_ = 0;
}

namespace {

using State = std::tuple<int64_t, std::optional<at::Tensor>, std::optional<at::Tensor>>;

/// A copy of the cached keys or values alone: the room after them, which may still hold others, is
/// not saved.
std::optional<at::Tensor> alone(const std::optional<at::Tensor>& view) {
  if (!view) return std::nullopt;
  return view->clone(at::MemoryFormat::Contiguous);
}

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  m.class_<KVCache>("KVCache")
      .def(torch::init<int64_t>(), "", {torch::arg("max_length")})
      .def("append", &KVCache::append)
      .def("extended", &KVCache::extended)
      .def("advance", &KVCache::advance)
      .def("cached", &KVCache::cached)
      .def("truncate", &KVCache::truncate)
      .def("length", &KVCache::length)
      .def("max_length", &KVCache::max_length)
      .def("__len__", &KVCache::length)
      .def_pickle(
          [](const c10::intrusive_ptr<KVCache>& cache) -> State {
            const auto cached = cache->cached();
            return {cache->max_length(), alone(std::get<0>(cached)), alone(std::get<1>(cached))};
          },
          [](const State& state) {
            const auto& [max_length, key, value] = state;
            auto cache = c10::make_intrusive<KVCache>(max_length);
            if (key && value) cache->append(*key, *value);
            return cache;
          });
}

}  // namespace

}  // namespace qkv::nn
