// From an op's arguments to the products that a device runs.

#pragma once

#include <torch/library.h>

#include <numeric>

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
      "as many inputs, grad_outputs and main_grads are needed as each other; got ", inputs.size(), ", ",
      grad_outputs.size(), " and ", main_grads.size());
  TORCH_CHECK_VALUE(
      bias_grads.empty() || bias_grads.size() == inputs.size(),
      "bias_grads must be none, or one an input (of no elements where there is no bias); got ", bias_grads.size(),
      " for ", inputs.size());
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

// Rows of input and grad_output lie group behind group: the tokens of an expert, say.
template <Run run>
void wgrad_accumulate_grouped(
    const at::Tensor& input, const at::Tensor& grad_output, at::IntArrayRef num_tokens, at::TensorList main_grads) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      num_tokens.size() == main_grads.size(), "as many numbers of tokens are needed as main_grads; got ",
      num_tokens.size(), " and ", main_grads.size());
  const at::Tensor rows = flattened(input, "input"), grad_rows = flattened(grad_output, "grad_output");
  TORCH_CHECK_VALUE(
      std::all_of(num_tokens.begin(), num_tokens.end(), [](int64_t n) { return n >= 0; }) &&
          std::accumulate(num_tokens.begin(), num_tokens.end(), int64_t{0}) == rows.size(0) &&
          rows.size(0) == grad_rows.size(0),
      "the numbers of tokens of the groups must sum to those of input and of grad_output; got ", num_tokens, " for ",
      rows.size(0), " and ", grad_rows.size(0));
  Products products;
  products.reserve(num_tokens.size());
  int64_t first = 0;
  for (size_t i = 0; i < num_tokens.size(); first += num_tokens[i++])
    products.push_back(checked(
        rows.narrow(0, first, num_tokens[i]), grad_rows.narrow(0, first, num_tokens[i]), main_grads[i]));
  run(products);
}

template <Run run>
void register_kernels(torch::Library& library) {
  library.impl("wgrad_accumulate", &wgrad_accumulate<run>);
  library.impl("wgrad_accumulate_many", &wgrad_accumulate_many<run>);
  library.impl("wgrad_accumulate_grouped", &wgrad_accumulate_grouped<run>);
}

}  // namespace zb
