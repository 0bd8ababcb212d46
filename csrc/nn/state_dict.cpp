#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>
#include <caffe2/serialize/inline_container.h>
#include <qkv/nn.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/csrc/jit/serialization/unpickler.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "nn/whole_file.h"

namespace qkv::nn {

namespace {

using StateDict = std::map<std::string, at::Tensor>;

/// The parameters and buffers of a module themselves, not copies.
StateDict state_dict_of(const torch::nn::Module& module) {
  StateDict state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) state[item.key()] = item.value();
  return state;
}

/// Whether all elements of a tensor are in the first `bytes` of its storage.
bool lies_within(int64_t bytes, const at::Tensor& x) {
  if (x.storage_offset() < 0) return false;
  bool empty = false;
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.size(i) < 0 || x.stride(i) < 0) return false;
    empty = empty || x.size(i) == 0;
  }
  if (empty) return true;
  int64_t room = bytes / x.element_size() - 1 - x.storage_offset();  // after the first element
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.stride(i) == 0) continue;
    if (x.size(i) - 1 > room / x.stride(i)) return false;
    room -= (x.size(i) - 1) * x.stride(i);
  }
  return room >= 0;
}

/// LibTorch does not check the sizes in a file against its bytes: of a damaged one it would read
/// what lies after them.
void check_whole(const std::string& path, const std::string& name, const at::Tensor& x,
                 int64_t bytes) {
  TORCH_CHECK_VALUE(lies_within(bytes, x), "qkv::nn::load_state_dict: ", path,
                    " is damaged: ", name, " has sizes ", x.sizes(), ", strides ", x.strides(),
                    " and offset ", x.storage_offset(), " in ", bytes, " bytes");
}

using Archive = caffe2::serialize::PyTorchStreamReader;

/// An archive of TorchScript's, which is also what torch::save writes.
StateDict read_script_module(const std::string& path, std::istream& file, Archive& archive) {
  const auto module = torch::jit::load(file, at::kCPU);
  StateDict state;
  for (const auto& item : module.named_parameters()) state[item.name] = item.value;
  for (const auto& item : module.named_buffers()) state[item.name] = item.value;

  // LibTorch does not tell which record is whose, but each storage must have one of its length.
  std::multiset<size_t> lengths;
  for (const auto& name : archive.getAllRecords()) lengths.insert(archive.getRecordSize(name));
  std::set<const void*> seen;
  for (const auto& [name, x] : state) {
    if (!x.has_storage()) continue;
    const size_t bytes = x.storage().nbytes();
    check_whole(path, name, x, bytes);
    if (bytes == 0 || !seen.insert(x.storage().data()).second) continue;
    const auto record = lengths.find(bytes);
    TORCH_CHECK_VALUE(record != lengths.end(), "qkv::nn::load_state_dict: ", path,
                      " is damaged: ", name, " lies in ", bytes,
                      " bytes, but there is no such record");
    lengths.erase(record);
  }
  return state;
}

/// As torch::pickle_load does, which does not tell how long the records are.
StateDict read_dict(const std::string& path, Archive& archive) {
  const auto pickled = archive.getRecord("data.pkl");
  const char* rest = static_cast<const char*>(std::get<0>(pickled).get());
  size_t size_of_rest = std::get<1>(pickled);
  std::map<const void*, int64_t> bytes_at;
  torch::jit::Unpickler unpickler(
      [&](char* to, size_t size) {
        size = std::min(size, size_of_rest);
        std::copy_n(rest, size, to);
        rest += size;
        size_of_rest -= size;
        return size;
      },
      nullptr, nullptr,
      [&](const std::string& name) {
        auto record = archive.getRecord("data/" + name);
        bytes_at[std::get<0>(record).get()] = std::get<1>(record);
        return std::move(std::get<0>(record));
      },
      at::kCPU);
  unpickler.set_version(archive.version());
  const c10::IValue value = unpickler.parse_ivalue();
  TORCH_CHECK(value.isGenericDict(), "it holds no dict");
  StateDict state;
  for (const auto& item : value.toGenericDict()) {
    TORCH_CHECK_VALUE(item.key().isString() && item.value().isTensor(),
                      "qkv::nn::load_state_dict: ", path, " must hold a dict from str to Tensor");
    const std::string& name = item.key().toStringRef();
    const at::Tensor x = item.value().toTensor();
    if (x.has_storage()) check_whole(path, name, x, bytes_at[x.storage().data()]);
    state[name] = x;
  }
  return state;
}

StateDict read_archive(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file.good(), "qkv::nn::load_state_dict: cannot read ", path);
  std::stringstream all;
  if (!file.seekg(0, std::ios::end)) {  // as in a pipe
    file.clear();
    all << file.rdbuf();
  }
  std::istream& stream = all.str().empty() ? static_cast<std::istream&>(file) : all;
  Archive archive(&stream);
  return archive.hasRecord("constants.pkl") ? read_script_module(path, stream, archive)
                                            : read_dict(path, archive);
}

/// What LibTorch says of a file that it cannot read names neither the file nor the remedy.
[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  TORCH_CHECK_VALUE(
      false, "qkv::nn::load_state_dict: ", path,
      " is no archive with a dict of tensors. An OrderedDict, as module.state_dict() "
      "returns, cannot be read without Python: write it with torch.save(dict(module."
      "state_dict()), path) or with qkv.nn.save_state_dict(module, path). (LibTorch: ",
      reason, ")");
}

StateDict read(const std::string& path) {
  try {
    return read_archive(path);
  } catch (const c10::ValueError&) {
    throw;
  } catch (const c10::Error& error) {
    refuse(path, error.what_without_backtrace());
  } catch (const std::exception& error) {
    refuse(path, error.what());
  }
}

/// The records of a dict, of which `pickled` is all but its tensors.
void write_archive(const std::string& path, const std::string& pickled,
                   const std::vector<at::Tensor>& tensors) {
  WholeFile file("qkv::nn::save_state_dict", path);
  // After a write that failed the writer throws in its destructor, which ends the process. So all
  // seem to succeed, and the file raises the error when it is done.
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, size_t size) {
    file.write(data, size);
    return size;
  });
  archive.writeRecord("data.pkl", pickled.data(), pickled.size());
  size_t number = 0;
  for (const at::Tensor& tensor : tensors) {
    archive.writeRecord("data/" + std::to_string(number++), tensor.storage().data(),
                        tensor.storage().nbytes());
  }
  archive.writeEndOfFile();
  file.done();
}

/// The keys of a that b lacks, for a message.
std::string keys_missing_in(const StateDict& b, const StateDict& a) {
  std::string list;
  for (const auto& [name, tensor] : a) {
    if (b.count(name) == 0) list += (list.empty() ? "" : ", ") + name;
  }
  return list;
}

}  // namespace

void load_state_dict(torch::nn::Module& module, const std::string& path) {
  const StateDict to = state_dict_of(module), from = read(path);
  const std::string missing = keys_missing_in(from, to), unexpected = keys_missing_in(to, from);
  TORCH_CHECK_VALUE(missing.empty() && unexpected.empty(), "qkv::nn::load_state_dict: ", path,
                    " does not fit ", module.name(), "; missing: [", missing, "], unexpected: [",
                    unexpected, "]");
  for (const auto& [name, tensor] : to) {
    const at::Tensor& found = from.at(name);
    TORCH_CHECK_VALUE(!tensor.is_meta(), "qkv::nn::load_state_dict: ", name,
                      " is on meta, which holds no numbers");
    TORCH_CHECK_VALUE(tensor.sizes() == found.sizes(), "qkv::nn::load_state_dict: ", name,
                      " has shape ", tensor.sizes(), ", but ", path, " has ", found.sizes());
    TORCH_CHECK_VALUE(
        tensor.layout() == found.layout() && tensor.is_quantized() == found.is_quantized(),
        "qkv::nn::load_state_dict: ", name, " is a ", tensor.toString(), ", but ", path, " has a ",
        found.toString());
    TORCH_CHECK_VALUE(
        tensor.layout() != at::kStrided || at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
        "qkv::nn::load_state_dict: ", name, " is an expanded view, which cannot be written");
    TORCH_CHECK_VALUE(!tensor.is_inference() || c10::InferenceMode::is_enabled(),
                      "qkv::nn::load_state_dict: ", name,
                      " is an inference tensor, which cannot be written outside of InferenceMode");
  }
  at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : to) tensor.copy_(from.at(name));
}

void save_state_dict(const torch::nn::Module& module, const std::string& path) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::TensorType::get());
  for (const auto& [name, tensor] : state_dict_of(module)) {
    TORCH_CHECK_VALUE(!tensor.is_meta(), "qkv::nn::save_state_dict: ", name,
                      " is on meta, which holds no numbers");
    dict.insert(name, tensor.detach().cpu());  // can be read on a machine without that device
  }

  // torch::pickle_save adds type tags that Python's torch.load refuses under weights_only=True, its
  // default; the pickler itself can do without.
  std::string pickled;
  torch::jit::Pickler pickler([&](const char* data, size_t size) { pickled.append(data, size); },
                              nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();
  write_archive(path, pickled, pickler.tensorData());
}

}  // namespace qkv::nn
