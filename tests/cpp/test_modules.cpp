#include <gtest/gtest.h>
#include <qkv/qkv.h>
#include <torch/torch.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

namespace {

using namespace qkv::nn;
using torch::Tensor;

std::vector<std::string> parameter_names(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) names.push_back(item.key());
  return names;
}

std::string printed(const torch::nn::Module& module) {
  std::ostringstream stream;
  module.pretty_print(stream);
  return stream.str();
}

/// softmax of the kept scores, from plain operations: what the modules are compared with.
Tensor plain_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keep) {
  const Tensor scores = q.matmul(k.transpose(-2, -1)) / std::sqrt(double(q.size(-1)));
  return scores.masked_fill(~keep, -INFINITY).softmax(-1).matmul(v);
}

Tensor lower_triangle(int64_t n) { return torch::ones({n, n}, torch::kBool).tril(); }

/// What a call has to say against its arguments.
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A folder of its own that goes with the test, if nothing is left in it but the files named.
struct Folder {
  explicit Folder(std::vector<std::string> files) : files_(std::move(files)) {
    EXPECT_NE(::mkdtemp(path.data()), nullptr);
  }
  ~Folder() {
    for (const std::string& file : files_) std::remove((*this / file).c_str());
    EXPECT_EQ(::rmdir(path.c_str()), 0);
  }
  std::string operator/(const std::string& file) const { return path + "/" + file; }

  std::string path = ::testing::TempDir() + "qkv_test_XXXXXX";

 private:
  std::vector<std::string> files_;
};

/// Files may grow to so many bytes only, as on a full disk.
struct LimitedFiles {
  explicit LimitedFiles(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before);
    const rlimit limited{bytes, before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limited);
  }
  ~LimitedFiles() {
    ::setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, signal);
  }
  rlimit before;
  void (*signal)(int) = std::signal(SIGXFSZ, SIG_IGN);
};

/// With one parameter.
struct OneTensor : torch::nn::Module {
  explicit OneTensor(const Tensor& x) { register_parameter("x", x, /*requires_grad=*/false); }
};

class Modules : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(0); }
};

TEST_F(Modules, ScaledDotProductAttention) {
  const Tensor q = torch::randn({2, 3, 4, 8}), k = torch::randn({2, 3, 6, 8}),
               v = torch::randn({2, 3, 6, 5});
  ScaledDotProductAttention module;
  const Tensor all = torch::ones({4, 6}, torch::kBool);
  EXPECT_TRUE(torch::allclose(module(q, k, v), plain_attention(q, k, v, all), 1e-5, 1e-6));
  ScaledDotProductAttention unscaled(ScaledDotProductAttentionOptions().scale(1.0));
  const auto [out, weights] = unscaled->forward_with_weights(q, k, v);
  EXPECT_TRUE(torch::allclose(weights, q.matmul(k.transpose(-2, -1)).softmax(-1), 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(out, weights.matmul(v), 1e-5, 1e-6));
  EXPECT_TRUE(torch::equal(module(q), module(q, q, q)));
  EXPECT_EQ(printed(*module), "qkv::nn::ScaledDotProductAttention(dropout=0, causal=false)");
}

TEST_F(Modules, SelfAttention) {
  SelfAttention module(SelfAttentionOptions(6, 4).d_v(3).causal(true));
  EXPECT_EQ(parameter_names(*module),
            (std::vector<std::string>{"w_q.weight", "w_k.weight", "w_v.weight"}));
  const Tensor x = torch::randn({2, 5, 6});
  const auto expected =
      plain_attention(module->w_q(x), module->w_k(x), module->w_v(x), lower_triangle(5));
  EXPECT_TRUE(torch::allclose(module(x), expected, 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(module(x[1]), expected[1], 1e-5, 1e-6));  // (T, d_in)
  EXPECT_EQ(module(torch::randn({2, 3, 5, 6})).sizes(), (std::vector<int64_t>{2, 3, 5, 3}));
  const auto [out, weights] = module->forward_with_weights(x);
  EXPECT_EQ(weights.sizes(), (std::vector<int64_t>{2, 5, 5}));
  EXPECT_TRUE(torch::allclose(weights.sum(-1), torch::ones({2, 5})));
  EXPECT_EQ(printed(*module),
            "qkv::nn::SelfAttention(d_in=6, d_out=4, d_v=3, bias=false, "
            "causal=true, dropout=0)");
}

TEST_F(Modules, SelfAttentionMasksOfEachSample) {
  SelfAttention module(6, 4);
  const Tensor x = torch::randn({2, 5, 6});
  const Tensor mask = (torch::rand({2, 5, 5}) < 0.6).logical_or(torch::eye(5).to(torch::kBool));
  EXPECT_TRUE(torch::allclose(module(x, mask),
                              plain_attention(module->w_q(x), module->w_k(x), module->w_v(x), mask),
                              1e-5, 1e-6));
}

TEST_F(Modules, MultiheadAttention) {
  MultiheadAttention module(MultiheadAttentionOptions(12, 3).causal(true));
  EXPECT_EQ(parameter_names(*module),
            (std::vector<std::string>{"w_q.weight", "w_q.bias", "w_k.weight", "w_k.bias",
                                      "w_v.weight", "w_v.bias", "w_o.weight", "w_o.bias"}));
  const Tensor x = torch::randn({2, 5, 12});
  const auto heads = [](const Tensor& t) { return t.view({2, 5, 3, 4}).transpose(1, 2); };
  const Tensor expected = module->w_o(plain_attention(heads(module->w_q(x)), heads(module->w_k(x)),
                                                      heads(module->w_v(x)), lower_triangle(5))
                                          .transpose(1, 2)
                                          .reshape({2, 5, 12}));
  EXPECT_TRUE(torch::allclose(module(x), expected, 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(module(x[0]), expected[0], 1e-5, 1e-6));
  const auto [out, weights] = module->forward_with_weights(x);
  EXPECT_TRUE(torch::allclose(out, expected, 1e-5, 1e-6));
  EXPECT_EQ(weights.sizes(), (std::vector<int64_t>{2, 3, 5, 5}));
  const auto mean = std::get<1>(module->forward_with_weights(x, {}, {}, {}, {}, {}, true));
  EXPECT_TRUE(torch::allclose(mean, weights.mean(1)));
  EXPECT_EQ(printed(*module),
            "qkv::nn::MultiheadAttention(embed_dim=12, num_heads=3, bias=true, "
            "dropout=0, causal=true)");
}

TEST_F(Modules, CrossAttentionIsDecidedByWhatIsGiven) {
  // torch::nn::MultiheadAttention compares values, and gives the key no gradient if they are equal.
  MultiheadAttention module(8, 2);
  const Tensor query = torch::randn({1, 3, 8});
  const Tensor key = query.clone().requires_grad_();
  module(query, key).sum().backward();
  EXPECT_GT(key.grad().abs().max().item<double>(), 0.0);
}

TEST_F(Modules, WidthsOfKeyAndValueAndHeads) {
  MultiheadAttention module(MultiheadAttentionOptions(12, 4)
                                .kdim(5)
                                .vdim(7)
                                .num_kv_heads(2)
                                .head_dim(6)
                                .bias(false)
                                .window(2, 1));
  EXPECT_EQ(module->w_q->weight.sizes(), (std::vector<int64_t>{24, 12}));
  EXPECT_EQ(module->w_k->weight.sizes(), (std::vector<int64_t>{12, 5}));
  EXPECT_EQ(module->w_v->weight.sizes(), (std::vector<int64_t>{12, 7}));
  EXPECT_EQ(module->w_o->weight.sizes(), (std::vector<int64_t>{12, 24}));
  const Tensor out =
      module(torch::randn({2, 3, 12}), torch::randn({2, 9, 5}), torch::randn({2, 9, 7}));
  EXPECT_EQ(out.sizes(), (std::vector<int64_t>{2, 3, 12}));
  EXPECT_EQ(printed(*module),
            "qkv::nn::MultiheadAttention(embed_dim=12, num_heads=4, kdim=5, vdim=7, "
            "num_kv_heads=2, head_dim=6, bias=false, dropout=0, causal=false, window=(2, 1))");
}

TEST_F(Modules, PaddingIsLeftOut) {
  MultiheadAttention module(8, 2);
  const Tensor x = torch::randn({2, 5, 8});
  Tensor padding = torch::zeros({2, 5}, torch::kBool);
  padding.index_put_({0, torch::indexing::Slice(3)}, true);
  padding[1].fill_(true);  // nothing left to attend to
  const Tensor out = module->forward(x, {}, {}, {}, padding);
  EXPECT_TRUE(torch::allclose(out[0].slice(0, 0, 3), module(x[0].slice(0, 0, 3)), 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(out[1], module->w_o->bias.expand({5, 8})));
  out.sum().backward();
  for (const auto& parameter : module->parameters()) {
    EXPECT_TRUE(parameter.grad().isfinite().all().item<bool>());
  }
}

TEST_F(Modules, CacheGivesTheSameAsTheWholeSequence) {
  MultiheadAttention module(
      MultiheadAttentionOptions(8, 4).num_kv_heads(2).causal(true).window(3, 0));
  const Tensor x = torch::randn({2, 9, 8});
  torch::NoGradGuard no_grad;
  const auto cache = c10::make_intrusive<KVCache>(9);
  std::vector<Tensor> parts;
  for (const auto& [from, to] : {std::pair{0, 4}, {4, 5}, {5, 9}}) {
    parts.push_back(module->forward(x.slice(1, from, to), {}, {}, {}, {}, cache));
  }
  EXPECT_TRUE(torch::allclose(torch::cat(parts, 1), module(x), 1e-5, 1e-6));
  cache->truncate(4);
  EXPECT_TRUE(torch::allclose(module->forward(x.slice(1, 4, 5), {}, {}, {}, {}, cache), parts[1],
                              1e-5, 1e-6));
}

TEST_F(Modules, CopiesOfACacheGoOnByThemselves) {
  MultiheadAttention module(MultiheadAttentionOptions(8, 2).causal(true));
  const Tensor prompt = torch::randn({1, 3, 8}), one = torch::randn({1, 1, 8}),
               other = torch::randn({1, 1, 8}), last = torch::randn({1, 1, 8});
  torch::NoGradGuard no_grad;
  const auto cache = c10::make_intrusive<KVCache>(10);
  module->forward(prompt, {}, {}, {}, {}, cache);
  const auto fork = c10::make_intrusive<KVCache>(*cache);
  module->forward(one, {}, {}, {}, {}, cache);
  module->forward(other, {}, {}, {}, {}, fork);
  EXPECT_EQ(fork->length(), 4);
  const Tensor whole = module(torch::cat({prompt, one, last}, 1));
  EXPECT_TRUE(
      torch::allclose(module->forward(last, {}, {}, {}, {}, cache), whole.slice(1, 4), 1e-5, 1e-6));
}

template <class Module>
void expect_dropout_in_training_only(Module module) {
  const Tensor x = torch::randn({1, 20, 8});
  EXPECT_FALSE(torch::equal(module(x), module(x)));
  module->eval();
  EXPECT_TRUE(torch::equal(module(x), module(x)));
}

TEST_F(Modules, DropoutInTrainingOnly) {
  using Scaled = ScaledDotProductAttention;
  expect_dropout_in_training_only(Scaled(ScaledDotProductAttentionOptions().dropout(0.5)));
  expect_dropout_in_training_only(SelfAttention(SelfAttentionOptions(8, 8).dropout(0.5)));
  expect_dropout_in_training_only(MultiheadAttention(MultiheadAttentionOptions(8, 2).dropout(0.5)));
  SelfAttention drops_all(SelfAttentionOptions(8, 8).dropout(1.0));
  EXPECT_FALSE(drops_all(torch::randn({1, 20, 8})).any().item<bool>());
}

TEST_F(Modules, TheKeyIsAlsoTheValueAndWhatPaddingIsOf) {
  const Tensor query = torch::randn({2, 3, 5, 8}), key = torch::randn({2, 3, 7, 8});
  const Tensor padding = torch::arange(7) > 4, kept = key.slice(-2, 0, 5);
  ScaledDotProductAttention scaled;
  MultiheadAttention multihead(8, 2);
  EXPECT_TRUE(torch::equal(scaled(query, key), scaled(query, key, key)));
  EXPECT_TRUE(torch::equal(multihead(query, key), multihead(query, key, key)));
  const Tensor expected = scaled(query, kept, kept);
  EXPECT_TRUE(torch::allclose(scaled(query, key, key, Tensor(), padding), expected, 1e-5, 1e-6));
  const auto [out, weights] = scaled->forward_with_weights(query, key, key, {}, padding);
  EXPECT_TRUE(torch::allclose(out, expected, 1e-5, 1e-6));
  EXPECT_FALSE(weights.slice(-1, 5).any().item<bool>());
}

TEST_F(Modules, AverageWeightsWithoutABatch) {
  MultiheadAttention module(8, 2);
  const Tensor x = torch::randn({5, 8});
  const Tensor weights = std::get<1>(module->forward_with_weights(x));
  const Tensor mean = std::get<1>(module->forward_with_weights(x, {}, {}, {}, {}, {}, true));
  EXPECT_TRUE(torch::equal(mean, weights.mean(-3)));
}

TEST_F(Modules, WeightsAndPaddingWithACache) {
  torch::NoGradGuard no_grad;
  MultiheadAttention module(MultiheadAttentionOptions(8, 2).causal(true).window(-1, 0));
  const Tensor x = torch::randn({2, 5, 8}), padding = torch::arange(5) < 2;
  const auto cache = c10::make_intrusive<KVCache>(5);
  const auto [out, weights] = module->forward_with_weights(x, {}, {}, {}, padding);
  module->forward_with_weights(x.slice(1, 0, 3), {}, {}, {}, padding.slice(0, 0, 3), cache);
  EXPECT_EQ(cache->length(), 3);
  const auto [last, of_last] =
      module->forward_with_weights(x.slice(1, 3), {}, {}, {}, padding, cache);
  EXPECT_TRUE(torch::allclose(last, out.slice(1, 3), 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(of_last, weights.slice(2, 3), 1e-5, 1e-6));
}

TEST_F(Modules, Initialisation) {
  MultiheadAttention equal(64, 4);  // one (192, 64) matrix for Glorot's bound
  const double bound = std::sqrt(6.0 / (64 + 192));
  for (const auto& linear : {equal->w_q, equal->w_k, equal->w_v}) {
    EXPECT_LE(linear->weight.abs().max().item<double>(), bound);
    EXPECT_NEAR(linear->weight.std().item<double>(), bound / std::sqrt(3.0), 0.05 * bound);
    EXPECT_EQ(linear->bias.abs().max().item<double>(), 0.0);
  }
  MultiheadAttention different(MultiheadAttentionOptions(64, 4).kdim(32));
  const double largest = different->w_k->weight.abs().max().item<double>();
  EXPECT_GT(largest, 0.95 * std::sqrt(6.0 / 96));
  EXPECT_LE(largest, std::sqrt(6.0 / 96));
}

TEST_F(Modules, CloneToAndSave) {
  MultiheadAttention module(MultiheadAttentionOptions(8, 2).causal(true));
  const Tensor x = torch::randn({1, 4, 8});
  const Tensor expected = module(x);

  auto clone = std::dynamic_pointer_cast<MultiheadAttentionImpl>(module->clone());
  EXPECT_TRUE(torch::equal(clone->forward(x), expected));
  {
    torch::NoGradGuard no_grad;
    clone->w_q->weight.zero_();
  }
  EXPECT_TRUE(torch::equal(module(x), expected));

  std::stringstream stream;
  torch::save(module, stream);
  MultiheadAttention loaded(MultiheadAttentionOptions(8, 2).causal(true));
  torch::load(loaded, stream);
  EXPECT_TRUE(torch::equal(loaded(x), expected));

  module->to(torch::kDouble);
  EXPECT_EQ(module(x.to(torch::kDouble)).scalar_type(), torch::kDouble);
}

TEST_F(Modules, StateDicts) {
  const Folder folder({"state_dict.pt"});
  const std::string path = folder / "state_dict.pt";
  MultiheadAttention module(8, 2);
  const Tensor x = torch::randn({1, 4, 8});
  for (const bool own_format : {true, false}) {
    if (own_format) {
      save_state_dict(*module, path);
    } else {
      torch::save(module, path);
    }
    MultiheadAttention loaded(8, 2);
    load_state_dict(*loaded, path);
    EXPECT_TRUE(torch::equal(loaded(x), module(x)));
  }
  const auto message = [](torch::nn::Module& other, const std::string& file) {
    return refusal([&] { load_state_dict(other, file); });
  };
  SelfAttention other(8, 8);
  EXPECT_NE(message(*other, path).find("missing: [], unexpected: [w_k.bias, w_o.bias"),
            std::string::npos);
  MultiheadAttention wider(16, 2);
  EXPECT_NE(message(*wider, path).find("w_k.bias has shape [16]"), std::string::npos);
  EXPECT_NE(message(*other, "/nonexistent").find("cannot read /nonexistent"), std::string::npos);
}

TEST_F(Modules, AFileThatCannotBeWrittenStaysAsItWas) {
  const Folder folder({"weights.pt", "link.pt"});
  const std::string path = folder / "weights.pt", link = folder / "link.pt";
  ASSERT_EQ(::symlink(path.c_str(), link.c_str()), 0);
  SelfAttention module(64, 64);
  const auto save = [&](const std::string& to) {
    return refusal([&] { save_state_dict(*module, to); });
  };
  const auto cannot = [](const std::string& file, const char* why) {
    return "qkv::nn::save_state_dict: cannot write " + file + ": " + why;
  };
  ASSERT_EQ(save(path), "");
  ASSERT_EQ(::chmod(path.c_str(), 0640), 0);
  const std::string before = contents(path);
  torch::nn::init::ones_(module->w_q->weight);
  for (const auto& file : {path, link, folder / "new.pt"}) {
    const LimitedFiles limited(10000);
    EXPECT_EQ(save(file), cannot(file, "File too large"));
    EXPECT_EQ(contents(path), before);
  }
  EXPECT_EQ(save("/dev/full"), cannot("/dev/full", "No space left on device"));
  EXPECT_EQ(save("/nonexistent/file"), cannot("/nonexistent/file", "No such file or directory"));
  EXPECT_EQ(save(folder.path), cannot(folder.path, "Is a directory"));

  EXPECT_EQ(save(link), "");
  EXPECT_NE(contents(path), before);
  struct stat kept;
  EXPECT_TRUE(::lstat(link.c_str(), &kept) == 0 && S_ISLNK(kept.st_mode));
  EXPECT_TRUE(::stat(path.c_str(), &kept) == 0 && (kept.st_mode & 0777) == 0640);
  SelfAttention loaded(64, 64);
  load_state_dict(*loaded, link);
  EXPECT_TRUE(torch::equal(loaded->w_q->weight, module->w_q->weight));

  OneTensor on_meta(torch::zeros({2}, torch::kMeta));
  EXPECT_EQ(refusal([&] { save_state_dict(on_meta, path); }),
            "qkv::nn::save_state_dict: x is on meta, which holds no numbers");
}

TEST_F(Modules, DamagedFilesAreNotReadBeyondTheirEnd) {
  const Folder folder({"damaged.pt"});
  const std::string path = folder / "damaged.pt";
  struct Geometry {
    std::vector<int64_t> sizes, strides;
    int64_t offset;
  };
  const auto save = [&](const OneTensor& module, bool script) {
    if (!script) return save_state_dict(module, path);
    torch::serialize::OutputArchive archive;
    module.save(archive);
    archive.save_to(path);
  };
  const auto refused = [&](const Geometry& g) {
    const Tensor x = torch::rand({7, 11});
    x.unsafeGetTensorImpl()->set_sizes_and_strides(g.sizes, g.strides);
    x.unsafeGetTensorImpl()->set_storage_offset(g.offset);
    std::string said[2];
    for (const bool script : {true, false}) {
      OneTensor damaged(x), other(torch::zeros(g.sizes));
      save(damaged, script);
      said[script] = refusal([&] { load_state_dict(other, path); });
      EXPECT_TRUE(other.parameters()[0].eq(0).all().item<bool>());
    }
    EXPECT_EQ(said[0], said[1]);
    return said[0];
  };
  const int64_t far = int64_t{1} << 62;
  EXPECT_EQ(refused({{7, 11}, {12, 1}, 0}),
            "qkv::nn::load_state_dict: " + path +
                " is damaged: x has sizes [7, 11], strides [12, 1] and offset 0 in 308 bytes");
  EXPECT_NE(refused({{7, 11}, {11, 1}, 1}), "");
  EXPECT_NE(refused({{7, 11}, {11, 1}, -1}), "");
  EXPECT_NE(refused({{7, 11}, {11, 1}, far}), "");
  EXPECT_NE(refused({{5, 5}, {far, far}, 0}), "");

  // A record that is said to be longer than it is.
  for (const bool script : {true, false}) {
    OneTensor damaged(torch::rand({7, 11}));
    save(damaged, script);
    std::string bytes = contents(path);
    for (const auto& [from, to] : {std::pair{"K\x4d", "K\xff"}, {"K\x0bK\x01", "K\x14K\x01"}}) {
      ASSERT_NE(bytes.find(from), std::string::npos);
      bytes.replace(bytes.find(from), std::strlen(from), to);
    }
    std::ofstream(path, std::ios::binary) << bytes;
    OneTensor other(torch::zeros({7, 11}));
    EXPECT_EQ(refusal([&] { load_state_dict(other, path); }),
              "qkv::nn::load_state_dict: " + path + " is damaged: x " +
                  (script ? "lies in 1020 bytes, but there is no such record"
                          : "has sizes [7, 11], strides [20, 1] and offset 0 in 308 bytes"));
  }
}

TEST_F(Modules, StateDictsThroughPipesAndFoldersThatTakeNoOtherFile) {
  const Folder folder({"pipe", std::string(250, 'x')});
  SelfAttention module(8, 8), through_pipe(8, 8), beside_none(8, 8);
  const std::string pipe = folder / "pipe", longest = folder / std::string(250, 'x');
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::thread writer([&] { save_state_dict(*module, pipe); });
  load_state_dict(*through_pipe, pipe);
  writer.join();
  EXPECT_TRUE(torch::equal(through_pipe->w_q->weight, module->w_q->weight));

  EXPECT_NE(refusal([&] { save_state_dict(*module, longest); }), "");
  std::ofstream(longest) << "there";
  save_state_dict(*module, longest);
  load_state_dict(*beside_none, longest);
  EXPECT_TRUE(torch::equal(beside_none->w_q->weight, module->w_q->weight));
}

TEST_F(Modules, WhatCannotBeWrittenIsSaidBeforeAnythingIsLoaded) {
  struct WithView : torch::nn::Module {
    explicit WithView(const Tensor& view) {
      register_parameter("first", torch::zeros({2}));
      register_buffer("view", view);
    }
  };
  const Folder folder({"weights.pt"});
  const std::string path = folder / "weights.pt";
  WithView whole(torch::ones({3})), expanded(torch::zeros({1}).expand({3}));
  torch::nn::init::ones_(whole.parameters()[0]);
  save_state_dict(whole, path);
  EXPECT_EQ(refusal([&] { load_state_dict(expanded, path); }),
            "qkv::nn::load_state_dict: view is an expanded view, which cannot be written");
  EXPECT_TRUE(expanded.parameters()[0].eq(0).all().item<bool>());
  Tensor inferred;
  {
    const c10::InferenceMode inference;
    inferred = torch::zeros({3});
  }
  WithView of_inference(inferred);
  EXPECT_EQ(refusal([&] { load_state_dict(of_inference, path); }),
            "qkv::nn::load_state_dict: view is an inference tensor, which cannot be written "
            "outside of InferenceMode");
  EXPECT_TRUE(of_inference.parameters()[0].eq(0).all().item<bool>());
  save_state_dict(expanded, path);  // as values, they can be saved, and loaded elsewhere
  load_state_dict(whole, path);
  EXPECT_TRUE(whole.buffers()[0].eq(0).all().item<bool>());

  WithView sparse(torch::ones({3}).to_sparse()), from_file(torch::zeros({3}).to_sparse());
  save_state_dict(sparse, path);
  load_state_dict(from_file, path);
  EXPECT_TRUE(from_file.buffers()[0].to_dense().eq(1).all().item<bool>());
}

TEST_F(Modules, InSequential) {
  torch::nn::Sequential model(SelfAttention(6, 6),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})),
                              MultiheadAttention(6, 2), ScaledDotProductAttention());
  EXPECT_EQ(model->forward(torch::randn({2, 5, 6})).sizes(), (std::vector<int64_t>{2, 5, 6}));
}

TEST_F(Modules, Trains) {
  // Copy the token two places back: impossible without attending to it.
  torch::nn::Embedding embedding(8, 32), position(12, 32);
  MultiheadAttention attention(MultiheadAttentionOptions(32, 4).causal(true));
  torch::nn::Linear head(32, 8);
  std::vector<Tensor> parameters;
  for (const auto& list : {embedding->parameters(), position->parameters(), attention->parameters(),
                           head->parameters()}) {
    parameters.insert(parameters.end(), list.begin(), list.end());
  }
  torch::optim::Adam optimizer(parameters, torch::optim::AdamOptions(1e-2));
  double loss_value = 0.0;
  for (int step = 0; step < 150; ++step) {
    const Tensor tokens = torch::randint(8, {16, 12});
    const Tensor x = embedding(tokens) + position(torch::arange(12));
    const Tensor logits = head(attention(x)).slice(1, 2);
    const Tensor loss =
        torch::cross_entropy_loss(logits.reshape({-1, 8}), tokens.slice(1, 0, 10).reshape(-1));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    loss_value = loss.item<double>();
  }
  EXPECT_LT(loss_value, 0.3);  // guessing gives 2.08
}

}  // namespace
