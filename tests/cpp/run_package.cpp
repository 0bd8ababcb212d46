// Runs an AOTInductor package for tests/python/test_doors.py, in a process without Python.
//
//   run_package PACKAGE.pt2 INPUTS OUTPUTS      both lists of tensors, as torch.save writes them

#include <qkv/qkv.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: run_package PACKAGE INPUTS OUTPUTS\n";
    return 2;
  }
  try {
    std::ifstream file(argv[2], std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const auto list = torch::pickle_load(bytes);
    std::vector<torch::Tensor> inputs;
    for (const auto& item : list.toListRef()) inputs.push_back(item.toTensor());
    torch::inductor::AOTIModelPackageLoader package(argv[1]);
    const auto written = torch::pickle_save(package.run(inputs));
    std::ofstream(argv[3], std::ios::binary)
        .write(written.data(), static_cast<std::streamsize>(written.size()));
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}
