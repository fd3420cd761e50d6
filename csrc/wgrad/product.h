// The operands of one deferred weight gradient, checked and flattened: main_grad += grad_output^T input.

#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zb {

// input (tokens, in) and grad_output (tokens, out) have the same dtype, main_grad (out, in) has unit stride along rows,
// bias_grad is (out) or undefined. All are on the same device, and the gradients do not overlap with other tensors.
struct Product {
  at::Tensor input;
  at::Tensor grad_output;
  at::Tensor main_grad;
  at::Tensor bias_grad;
};

using Products = std::vector<Product>;

}  // namespace zb
