// One deferred weight gradient, checked and flattened: main_grad += grad_output^T input.

#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zb {

// input (tokens, in) and grad_output (tokens, out) of one dtype, main_grad (out, in) with rows of unit stride,
// bias_grad (out) or undefined. All on one device; the grads overlap nothing.
struct Product {
  at::Tensor input;
  at::Tensor grad_output;
  at::Tensor main_grad;
  at::Tensor bias_grad;
};

using Products = std::vector<Product>;

}  // namespace zb
