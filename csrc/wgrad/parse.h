// Converts the arguments of an op to the products that a device computes.

#pragma once

#include <torch/library.h>

#include "checks.h"
#include "product.h"

namespace zb {

using Run = void (*)(const Products&);

template <Run run>
void wgrad_accumulate(const at::Tensor& input, const at::Tensor& grad_output, at::Tensor& main_grad) {
  const at::NoGradGuard no_grad;
  run({checked(input, grad_output, main_grad)});
}

template <Run run>
void wgrad_accumulate_many(
    at::TensorList inputs, at::TensorList grad_outputs, at::TensorList main_grads, at::TensorList bias_grads) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      inputs.size() == grad_outputs.size() && inputs.size() == main_grads.size(),
      "inputs, grad_outputs and main_grads must have the same length; got ", inputs.size(), ", ",
      grad_outputs.size(), " and ", main_grads.size());
  TORCH_CHECK_VALUE(
      bias_grads.empty() || bias_grads.size() == inputs.size(),
      "bias_grads must be empty or have one tensor per input (without elements if there is no bias); got ",
      bias_grads.size(), " for ", inputs.size(), " inputs");
  Products products;
  products.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    products.push_back(
        checked(inputs[i], grad_outputs[i], main_grads[i], bias_grads.empty() ? at::Tensor() : bias_grads[i]));
    TORCH_CHECK_VALUE(
        inputs[i].device() == inputs[0].device(), "all inputs must be on one device; got ", inputs[0].device(),
        " and ", inputs[i].device());
  }
  run(products);
}

template <Run run>
void register_kernels(torch::Library& library) {
  library.impl("wgrad_accumulate", &wgrad_accumulate<run>);
  library.impl("wgrad_accumulate_many", &wgrad_accumulate_many<run>);
}

}  // namespace zb
