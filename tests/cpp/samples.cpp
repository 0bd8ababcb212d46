#include "samples.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <random>

namespace samples {

namespace {

using nlohmann::json;
using torch::Tensor;

Tensor normal(const std::vector<int64_t>& shape) { return torch::randn(shape, torch::kDouble); }

std::vector<int64_t> joined(std::vector<int64_t> front, std::initializer_list<int64_t> back) {
  front.insert(front.end(), back);
  return front;
}

Tensor laid_out(const Tensor& x, const std::string& layout, bool is_query) {
  if (layout == "rows_heads") return x.transpose(-3, -2).contiguous().transpose(-3, -2);
  if (layout == "columns_rows") return x.transpose(-2, -1).contiguous().transpose(-2, -1);
  if (layout == "strided_columns") {
    return torch::stack({x, torch::full_like(x, std::numeric_limits<double>::quiet_NaN())}, -1)
        .select(-1, 0);
  }
  if (layout == "expanded_keys" && !is_query) return x.slice(0, 0, 1).expand(x.sizes());
  return x;
}

Tensor mask_of(const json& spec) {
  const auto shape = spec["shape"].get<std::vector<int64_t>>();
  Tensor keep = torch::rand(shape) < 0.7;
  for (int64_t row : spec.value("empty_rows", std::vector<int64_t>())) {
    keep.view({-1, shape.back()}).select(0, row).fill_(false);
  }
  if (spec.value("dtype", "bool") == "bool") return keep;
  const Tensor mask = normal(shape);
  return spec.value("minus_inf", false)
             ? mask.masked_fill(~keep, -std::numeric_limits<double>::infinity())
             : mask;
}

Sample make(const json& e) {
  Sample s;
  s.name = e["name"];
  s.large = e.value("large", false);
  s.empty = e.value("empty", false);
  const int64_t heads = e.value("heads", 3), kv_heads = e.value("kv_heads", heads);
  const int64_t queries = e.value("queries", 5), keys = e.value("keys", 7);
  const int64_t head_dim = e.value("head_dim", 4), value_dim = e.value("value_dim", head_dim);
  std::vector<int64_t> front, kv_front;
  if (!(e.contains("batch") && e["batch"].is_null())) {
    const auto batch = e.value("batch", std::vector<int64_t>{2});
    front = joined(batch, {heads});
    kv_front = joined(e.value("kv_batch", batch), {kv_heads});
  }
  const std::string layout = e.value("layout", "");
  s.query = laid_out(normal(joined(front, {queries, head_dim})), layout, true);
  s.key = laid_out(normal(joined(kv_front, {keys, head_dim})), layout, false);
  s.value = laid_out(normal(joined(kv_front, {keys, value_dim})), layout, false);

  s.options.is_causal(e.value("is_causal", false))
      .enable_gqa(e.value("enable_gqa", false))
      .softcap(e.value("softcap", 0.0))
      .dropout_p(e.value("dropout_p", 0.0));
  if (e.contains("scale")) s.options.scale(e["scale"].get<double>());
  if (e.contains("window")) s.options.window(e["window"][0], e["window"][1]);
  if (e.contains("query_offset")) s.options.query_offset(e["query_offset"].get<int64_t>());
  if (e.contains("attn_mask")) s.options.attn_mask(mask_of(e["attn_mask"]));
  if (e.contains("key_mask")) s.options.key_mask(mask_of(e["key_mask"]));
  const auto random = [](const json& spec) {
    return torch::rand(spec["shape"].get<std::vector<int64_t>>(), torch::kDouble);
  };
  if (e.contains("alibi_slopes")) s.options.alibi_slopes(random(e["alibi_slopes"]));
  if (e.contains("sinks")) s.options.sinks(random(e["sinks"]));
  return s;
}

/// An entry as those of the table; tests/python/random_samples.py draws such ones too.
class Drawn {
 public:
  explicit Drawn(unsigned seed) : generator_(seed) {}

  json entry() {
    const int64_t kv_heads = number(1, 2), heads = kv_heads * number(1, 2);
    const int64_t queries = number(1, 4), keys = number(1, 4);
    std::vector<int64_t> batch;
    if (heads < 4 && sometimes()) batch = {2};  // few numbers in all
    json e = {{"batch", batch},
              {"kv_batch", broadcast(batch)},
              {"heads", heads},
              {"kv_heads", kv_heads},
              {"enable_gqa", true},
              {"queries", queries},
              {"keys", keys},
              {"head_dim", number(1, 3)},
              {"value_dim", number(1, 3)},
              {"is_causal", sometimes()}};
    if (sometimes()) e["window"] = {number(-1, keys), number(-1, keys)};
    if (sometimes()) e["query_offset"] = number(-1, keys);
    if (sometimes()) e["scale"] = 0.25 * static_cast<double>(number(-6, 6));
    if (sometimes()) e["softcap"] = 0.5 * static_cast<double>(number(1, 8));
    if (sometimes()) e["dropout_p"] = 0.1 * static_cast<double>(number(1, 6));
    if (sometimes()) {
      auto shape = broadcast(joined(batch, {heads, queries}));
      shape.push_back(keys);
      const bool is_bool = number(0, 2) == 0;  // a float one has a gradient
      e["attn_mask"] = {
          {"dtype", is_bool ? "bool" : "float"}, {"shape", shape}, {"minus_inf", sometimes()}};
      if (sometimes()) e["attn_mask"]["empty_rows"] = json::array({0});
    }
    if (sometimes()) e["key_mask"]["shape"] = joined(broadcast(batch), {keys});
    if (sometimes()) e["alibi_slopes"]["shape"] = joined(broadcast(batch), {heads});
    if (sometimes()) e["sinks"]["shape"] = joined(broadcast(batch), {heads});
    return e;
  }

 private:
  // Not by <random>'s distributions, which differ from one standard library to the next.
  int64_t number(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(generator_() % static_cast<uint64_t>(most - least + 1));
  }

  bool sometimes() { return number(0, 1) == 1; }

  /// Some of it 1.
  std::vector<int64_t> broadcast(std::vector<int64_t> shape) {
    for (int64_t& size : shape) size = number(0, 2) == 0 ? 1 : size;
    return shape;
  }

  std::mt19937 generator_;
};

}  // namespace

std::vector<Sample> all() {
  std::ifstream file(QKV_SAMPLES);
  TORCH_CHECK(file.good(), "cannot read ", QKV_SAMPLES);
  torch::manual_seed(0);
  std::vector<Sample> found;
  for (const json& entry : json::parse(file)) found.push_back(make(entry));
  return found;
}

std::vector<Sample> small() {
  std::vector<Sample> found = all();
  std::erase_if(found, [](const Sample& s) { return s.large || s.empty; });
  return found;
}

std::vector<Sample> random(int count) {
  Drawn drawn(0);
  torch::manual_seed(0);
  std::vector<Sample> found;
  for (int i = 0; i < count; ++i) {
    json entry = drawn.entry();
    entry["name"] = entry.dump();
    found.push_back(make(entry));
  }
  return found;
}

std::vector<Sample> named(const std::vector<std::string>& names) {
  std::vector<Sample> found = all();
  std::erase_if(found, [&](const Sample& s) {
    return std::find(names.begin(), names.end(), s.name) == names.end();
  });
  TORCH_CHECK(found.size() == names.size(), "samples.json lacks one of ", names);
  return found;
}

}  // namespace samples
