#include <qkv/qkv.h>
#include <torch/script.h>

#include <iostream>

// Calls the operator by its name only, as a loaded model does: no symbol of libqkv is used here
// but what <qkv/qkv.h> itself refers to.
int main() {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("qkv::attention", "");
  const auto x = torch::ones({1, 1, 4, 8});
  torch::jit::Stack stack{x, x, x};
  for (size_t i = 3; i < op.schema().arguments().size(); ++i) {
    stack.push_back(*op.schema().arguments()[i].default_value());
  }
  op.callBoxed(&stack);
  const auto out = stack.at(0).toTensor();
  std::cout << "output " << out.sizes() << std::endl;
  return torch::equal(out, x) ? 0 : 1;
}
