// Runs a module of qkv::nn for tests/python/test_modules.py, which compares with its Python twin.
//
//   module_twin SPEC.json: {"module", its options, "weights": state dict to read, "inputs": dict of
//   tensors by argument name, "output": dict to write with "output", "weights" and gradients}

#include <qkv/qkv.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace {

using nlohmann::json;
using torch::Tensor;
using Tensors = c10::Dict<std::string, Tensor>;

Tensors read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Tensors found;
  for (const auto& item : torch::pickle_load(bytes).toGenericDict()) {
    found.insert(item.key().toStringRef(), item.value().toTensor());
  }
  return found;
}

void write(const std::string& path, const Tensors& tensors) {
  const auto bytes = torch::pickle_save(tensors);
  std::ofstream(path, std::ios::binary).write(bytes.data(), bytes.size());
}

template <class T>
std::optional<T> optional(const json& spec, const char* name) {
  return spec.contains(name) && !spec[name].is_null() ? std::optional(spec[name].get<T>())
                                                      : std::nullopt;
}

using Results = std::tuple<Tensor, Tensor>;

template <class Module>
void run(Module module, const json& spec,
         const std::function<Results(Module&, const Tensors&)>& f) {
  qkv::nn::load_state_dict(*module, spec["weights"]);
  const auto [output, weights] = f(module, read(spec["inputs"]));
  Tensors results;
  results.insert("output", output.detach());
  results.insert("weights", weights.detach());
  if (!module->parameters().empty()) {
    output.sin().sum().backward();
    for (const auto& item : module->named_parameters()) {
      results.insert("grad." + item.key(), item.value().grad());
    }
  }
  write(spec["output"], results);
  qkv::nn::save_state_dict(*module, spec["saved"]);
}

Tensor get(const Tensors& inputs, const char* name) {
  return inputs.contains(name) ? inputs.at(name) : Tensor();
}

}  // namespace

int main(int argc, char** argv) {
  TORCH_CHECK(argc == 2, "usage: module_twin SPEC.json");
  std::ifstream file(argv[1]);
  const json spec = json::parse(file);
  const json& o = spec["options"];
  if (spec["module"] == "ScaledDotProductAttention") {
    using Module = qkv::nn::ScaledDotProductAttention;
    Module module(qkv::nn::ScaledDotProductAttentionOptions()
                      .scale(optional<double>(o, "scale"))
                      .causal(o.value("causal", false)));
    run<Module>(module, spec, [](Module& m, const Tensors& in) {
      return m->forward_with_weights(get(in, "query"), get(in, "key"), get(in, "value"),
                                     get(in, "attn_mask"), get(in, "key_padding_mask"));
    });
  } else if (spec["module"] == "SelfAttention") {
    using Module = qkv::nn::SelfAttention;
    Module module(qkv::nn::SelfAttentionOptions(o["d_in"], o["d_out"])
                      .d_v(optional<int64_t>(o, "d_v"))
                      .bias(o.value("bias", false))
                      .causal(o.value("causal", false))
                      .scale(optional<double>(o, "scale")));
    run<Module>(module, spec, [](Module& m, const Tensors& in) {
      return m->forward_with_weights(get(in, "input"), get(in, "attn_mask"),
                                     get(in, "key_padding_mask"));
    });
  } else {
    using Module = qkv::nn::MultiheadAttention;
    auto options = qkv::nn::MultiheadAttentionOptions(o["embed_dim"], o["num_heads"])
                       .kdim(optional<int64_t>(o, "kdim"))
                       .vdim(optional<int64_t>(o, "vdim"))
                       .num_kv_heads(optional<int64_t>(o, "num_kv_heads"))
                       .head_dim(optional<int64_t>(o, "head_dim"))
                       .bias(o.value("bias", true))
                       .causal(o.value("causal", false));
    if (o.contains("window")) options.window(o["window"][0], o["window"][1]);
    run<Module>(Module(options), spec, [](Module& m, const Tensors& in) {
      return m->forward_with_weights(get(in, "query"), get(in, "key"), get(in, "value"),
                                     get(in, "attn_mask"), get(in, "key_padding_mask"));
    });
  }
}
