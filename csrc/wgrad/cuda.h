// Weight gradients on CUDA, by cuBLASLt or, where it refuses, by torch's own matrix products.

#pragma once

#include <ATen/Context.h>
#include <ATen/ops/mm.h>
#include <torch/version.h>

#include "cublaslt.h"
#include "operand.h"
#include "product.h"

namespace zb {

// Whether torch may round the float32 operands of matrix products to TensorFloat-32. From torch 2.9 on, the older
// question, allowTF32CuBLAS, raises an error if a job has answered only the newer one.
inline bool allows_tf32() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
#elif TORCH_VERSION_MINOR == 9
  return at::globalContext().float32Precision("cuda", "matmul") == "tf32";
#else
  return at::globalContext().allowTF32CuBLAS();
#endif
}

inline Dtype dtype_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat       ? Dtype::kFloat
         : tensor.scalar_type() == at::kBFloat16 ? Dtype::kBFloat16
                                                  : Dtype::kHalf;
}

inline Matrix matrix_of(const at::Tensor& tensor) {
  const Operand operand(tensor);
  return {tensor.const_data_ptr(), operand.leading, operand.is_row_major};
}

// Computes what wgrad_accumulate of engine/kernels/reference.py does.
inline void accumulate_in_torch(const Product& product) {
  if (product.main_grad.scalar_type() == product.input.scalar_type())
    product.main_grad.addmm_(product.grad_output.t(), product.input);
  else
    product.main_grad.add_(at::mm(product.grad_output.t(), product.input, at::kFloat));
}

inline void accumulate_on_cuda(const Product& product, cudaStream_t stream, void* workspace) {
  const int64_t tokens = product.input.size(0), in = product.input.size(1), out = product.grad_output.size(1);
  if (tokens == 0 || out == 0) return;
  bool sums_bias = false;
  at::Tensor bias_sum;
  // cuBLASLt sums a bias in the dtype of the gradient.
  if (product.bias_grad.defined() && product.main_grad.scalar_type() == at::kFloat)
    bias_sum = product.grad_output.new_empty({out}, at::TensorOptions().dtype(at::kFloat));
  if (in > 0) {
    const at::Tensor x = fitting(product.input), dy = fitting(product.grad_output);
    const Gemm gemm{
        matrix_of(x),
        matrix_of(dy),
        product.main_grad.mutable_data_ptr(),
        leading_of(product.main_grad),
        bias_sum.defined() ? bias_sum.mutable_data_ptr<float>() : nullptr,
        tokens,
        in,
        out,
        dtype_of(product.input),
        dtype_of(product.main_grad),
        product.input.scalar_type() == at::kFloat && allows_tf32()};
    const Outcome outcome = queue_gemm(gemm, product.input.device().index(), stream, workspace);
    TORCH_CHECK(
        outcome.result != Result::kFailed, "the weight gradient of ", product.input.sizes(), " and ",
        product.grad_output.sizes(), " failed in cuBLASLt: ", outcome.why,
        "; use --no-zero-bubble-fuse-wgrad to compute it in torch");
    if (outcome.result == Result::kQueued) {
      product.main_grad.unsafeGetTensorImpl()->bump_version();
    } else {
      TORCH_WARN_ONCE(
          "cuBLASLt refused the weight gradient of ", product.input.sizes(), " and ", product.grad_output.sizes(), " (",
          outcome.why, "); torch computes it, and others that may be refused, which is slower");
      accumulate_in_torch(product);
    }
    sums_bias = outcome.sums_bias;
  }
  if (product.bias_grad.defined())
    product.bias_grad.add_(sums_bias ? bias_sum : product.grad_output.sum(0, false, at::kFloat));
}

}  // namespace zb
