#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>

// torch::autograd::Node is not a stable interface: up to torch 2.12 nodes are held by
// std::shared_ptr, later by c10::intrusive_ptr.

namespace qkv::autograd {

using torch::autograd::Node;

constexpr bool kNodesAreIntrusive = std::is_base_of_v<c10::intrusive_ptr_target, Node>;

template <class T>
auto make_node() {
  if constexpr (kNodesAreIntrusive) {
    return c10::make_intrusive<T>();
  } else {
    // A generic lambda: where deleteNode does not exist its body is never looked at.
    return std::shared_ptr<T>(new T(), [](auto* node) { deleteNode(node); });
  }
}

template <class T>
using NodePointer = decltype(make_node<T>());

}  // namespace qkv::autograd
