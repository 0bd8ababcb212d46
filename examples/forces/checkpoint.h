#pragma once

#include <torch/torch.h>

#include <functional>
#include <vector>

/// What torch.utils.checkpoint is in Python.
namespace checkpoint {

using Block = std::function<torch::Tensor(const std::vector<torch::Tensor>&)>;

/// block(inputs), of which nothing but the inputs is kept: who needs gradients runs the block
/// again. Can be differentiated twice, as forces do that are trained on. Random numbers are the
/// same again, so that dropout drops the same; autocast is not taken note of.
///
/// \param parameters what the block depends on besides its inputs, and may want gradients
torch::Tensor run(const Block& block, const std::vector<torch::Tensor>& inputs,
                  const std::vector<torch::Tensor>& parameters);

}  // namespace checkpoint
