// Argument checks of the ops. Every violation raises a ValueError with the rule and the values.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "product.h"

namespace zb {

inline bool is_input_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Reshapes a tensor to (tokens, features); copies only if no view is possible.
inline at::Tensor flattened(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.dim() >= 1, name, " needs at least one dimension, the features; got a scalar");
  int64_t tokens = 1;
  for (const int64_t size : tensor.sizes().slice(0, tensor.dim() - 1)) tokens *= size;
  return tensor.dim() == 2 ? tensor : tensor.reshape({tokens, tensor.size(-1)});
}

inline void check_grad(const at::Tensor& grad, const char* name, at::IntArrayRef shape, const at::Tensor& input) {
  TORCH_CHECK_VALUE(
      grad.sizes() == shape, name, " must have the shape of its parameter, ", shape, "; got ", grad.sizes());
  TORCH_CHECK_VALUE(
      grad.scalar_type() == at::kFloat || grad.scalar_type() == input.scalar_type(), name,
      " must have dtype float32 or the dtype of the input, ", input.scalar_type(), "; got ", grad.scalar_type());
  TORCH_CHECK_VALUE(
      grad.device() == input.device(), name, " must be on the device of the input, ", input.device(), "; got ",
      grad.device());
}

inline Product checked(
    const at::Tensor& input, const at::Tensor& grad_output, const at::Tensor& main_grad,
    const at::Tensor& bias_grad = {}) {
  TORCH_CHECK_VALUE(
      is_input_dtype(input.scalar_type()), "input must be float32, bfloat16 or float16; got ", input.scalar_type());
  TORCH_CHECK_VALUE(
      grad_output.scalar_type() == input.scalar_type(), "grad_output must have the dtype of the input, ",
      input.scalar_type(), "; got ", grad_output.scalar_type());
  TORCH_CHECK_VALUE(
      grad_output.device() == input.device(), "grad_output must be on the device of the input, ", input.device(),
      "; got ", grad_output.device());
  Product product{flattened(input, "input"), flattened(grad_output, "grad_output"), main_grad, {}};
  TORCH_CHECK_VALUE(
      product.input.size(0) == product.grad_output.size(0),
      "input and grad_output must have the same number of tokens; got shapes ", input.sizes(), " and ",
      grad_output.sizes());
  check_grad(main_grad, "main_grad", {product.grad_output.size(1), product.input.size(1)}, input);
  TORCH_CHECK_VALUE(
      main_grad.numel() == 0 || main_grad.size(1) == 1 || main_grad.stride(1) == 1,
      "main_grad must have rows of unit stride; got strides ", main_grad.strides());
  TORCH_CHECK_VALUE(
      main_grad.numel() == 0 || main_grad.size(0) == 1 || main_grad.stride(0) >= main_grad.size(1),
      "main_grad must not overlap itself; got strides ", main_grad.strides());
  if (bias_grad.defined() && bias_grad.numel() > 0) {
    check_grad(bias_grad, "bias_grad", {product.grad_output.size(1)}, input);
    TORCH_CHECK_VALUE(
        bias_grad.numel() == 1 || bias_grad.stride(0) >= 1, "bias_grad must not overlap itself; got strides ",
        bias_grad.strides());
    product.bias_grad = bias_grad;
  }
  return product;
}

// The address range from the first to the last element of a tensor.
struct Extent {
  const char* begin;
  const char* end;

  explicit Extent(const at::Tensor& tensor) {
    begin = static_cast<const char*>(tensor.const_data_ptr());
    int64_t last = tensor.numel() > 0 ? 1 : 0;
    for (int64_t i = 0; last != 0 && i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    end = begin + last * tensor.element_size();
  }

  bool meets(const Extent& other) const { return begin < other.end && other.begin < end; }
  bool is(const Extent& other) const { return begin == other.begin && end == other.end; }
};

// The same gradient may occur in several products. Otherwise gradients must not share memory with each other or with
// operands.
inline void check_no_overlap(const Products& products) {
  std::vector<std::pair<Extent, const char*>> extents;
  for (const Product& product : products) {
    extents.emplace_back(product.input, "an input");
    extents.emplace_back(product.grad_output, "a grad_output");
    extents.emplace_back(product.main_grad, nullptr);
    if (product.bias_grad.defined()) extents.emplace_back(product.bias_grad, nullptr);
  }
  std::sort(extents.begin(), extents.end(), [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  // Extents are sorted by their begin. If any earlier gradient (or operand) overlaps with the next extent, then so does
  // the earlier gradient (or operand) with the greatest end.
  const std::pair<Extent, const char*>*grad = nullptr, *operand = nullptr;
  for (const auto& next : extents) {
    if (next.first.begin == next.first.end) continue;
    const bool is_grad = next.second == nullptr;
    const char* with = is_grad ? "another gradient" : next.second;
    TORCH_CHECK_VALUE(
        grad == nullptr || !grad->first.meets(next.first) || (is_grad && grad->first.is(next.first)),
        "a gradient to be updated must not share memory with ", with, "; clone one of them");
    TORCH_CHECK_VALUE(
        !is_grad || operand == nullptr || !operand->first.meets(next.first),
        "a gradient to be updated must not share memory with ", operand == nullptr ? "" : operand->second,
        "; clone one of them");
    auto& farthest = is_grad ? grad : operand;
    if (farthest == nullptr || farthest->first.end < next.first.end) farthest = &next;
  }
}

}  // namespace zb
