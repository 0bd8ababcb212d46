#include "checkpoint.h"

namespace checkpoint {

namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a node can hold of things that are no tensors.
struct Held : torch::CustomClassHolder {
  explicit Held(const Block& block) : block(block) {}
  const Block block;
};

/// Takes the generator back to a state, and at its end to where it was.
class RandomState {
 public:
  explicit RandomState(const Tensor& state) : before_(get()) { set(state); }
  ~RandomState() { set(before_); }

  static Tensor get() {
    auto generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.get_state();
  }

 private:
  static void set(const Tensor& state) {
    auto generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }

  const Tensor before_;
};

struct Checkpoint : torch::autograd::Function<Checkpoint> {
  /// \param tensors inputs, then parameters
  static Tensor forward(AutogradContext* ctx, const Block& block, int64_t inputs,
                        at::TensorList tensors) {
    ctx->saved_data["block"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(block));
    ctx->saved_data["inputs"] = inputs;
    ctx->saved_data["random_state"] = RandomState::get();
    ctx->save_for_backward(tensors.vec());
    return block(tensors.slice(0, inputs).vec());  // grad mode is off in here
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    // With create_graph the gradients depend on the inputs by what made these; without, the block
    // is a graph by itself.
    const bool create_graph = torch::GradMode::is_enabled();
    const variable_list tensors = ctx->get_saved_variables();
    const auto count = ctx->saved_data["inputs"].toInt();
    variable_list inputs, wanted;
    std::vector<size_t> places;
    torch::AutoGradMode grad_mode(true);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& x = tensors[i];
      const bool is_input = static_cast<int64_t>(i) < count;
      if (is_input) {
        // Another tensor, so that gradients stop here and do not go on to what made this one.
        inputs.push_back(create_graph ? x.view_as(x)
                                      : x.detach().requires_grad_(x.requires_grad()));
      }
      if (!x.requires_grad()) continue;
      wanted.push_back(is_input ? inputs.back() : x);
      places.push_back(i);
    }
    const auto held = ctx->saved_data["block"].toCapsule();
    Tensor output;
    {
      const RandomState again(ctx->saved_data["random_state"].toTensor());
      output = static_cast<const Held&>(*held).block(inputs);
    }
    const auto found = torch::autograd::grad({output}, wanted, grads, /*retain_graph=*/create_graph,
                                             create_graph, /*allow_unused=*/true);
    variable_list result(2 + tensors.size());  // block and count have none
    for (size_t i = 0; i < places.size(); ++i) result[2 + places[i]] = found[i];
    return result;
  }
};

}  // namespace

torch::Tensor run(const Block& block, const std::vector<Tensor>& inputs,
                  const std::vector<Tensor>& parameters) {
  std::vector<Tensor> tensors = inputs;
  tensors.insert(tensors.end(), parameters.begin(), parameters.end());
  return Checkpoint::apply(block, static_cast<int64_t>(inputs.size()), at::TensorList(tensors));
}

}  // namespace checkpoint
