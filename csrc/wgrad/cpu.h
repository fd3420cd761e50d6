// Weight gradients on the CPU, with the BLAS library that is part of torch.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "checks.h"
#include "operand.h"
#include "product.h"

extern "C" {
// oneMKL's bfloat16 x bfloat16 -> float32 (with AMX or AVX512-bf16 if available); other BLAS libraries lack it.
void gemm_bf16bf16f32_(
    const char* transa, const char* transb, const int* m, const int* n, const int* k, const float* alpha,
    const c10::BFloat16* a, const int* lda, const c10::BFloat16* b, const int* ldb, const float* beta, float* c,
    const int* ldc) __attribute__((weak));
}

namespace zb {

inline void accumulate_bf16(const Product& product) {
  const at::Tensor x = fitting(product.input), dy = fitting(product.grad_output);
  const Operand a(x), b(dy);
  // BLAS is column-major: it computes main_grad^T (in, out) += input^T (in, tokens) * grad_output (tokens, out).
  const int m = x.size(1), n = dy.size(1), k = x.size(0);
  const int lda = a.leading, ldb = b.leading, ldc = leading_of(product.main_grad);
  const float one = 1;
  gemm_bf16bf16f32_(
      a.is_row_major ? "N" : "T", b.is_row_major ? "T" : "N", &m, &n, &k, &one, x.const_data_ptr<c10::BFloat16>(), &lda,
      dy.const_data_ptr<c10::BFloat16>(), &ldb, &one, product.main_grad.mutable_data_ptr<float>(), &ldc);
  product.main_grad.unsafeGetTensorImpl()->bump_version();
}

// Number of tokens converted to float32 at a time: large enough for a fast GEMM, small enough for the cache.
constexpr int64_t kSlice = 512;

inline void accumulate_widened(const Product& product) {
  for (int64_t first = 0; first < product.input.size(0); first += kSlice) {
    const int64_t size = std::min(kSlice, product.input.size(0) - first);
    const at::Tensor dy = product.grad_output.narrow(0, first, size).to(at::kFloat);
    product.main_grad.addmm_(dy.t(), product.input.narrow(0, first, size).to(at::kFloat));
  }
}

inline void accumulate_on_cpu(const Product& product) {
  if (product.bias_grad.defined()) product.bias_grad.add_(product.grad_output.sum(0, false, at::kFloat));
  if (product.input.size(0) == 0 || product.main_grad.numel() == 0) return;
  if (product.main_grad.scalar_type() == product.input.scalar_type())
    product.main_grad.addmm_(product.grad_output.t(), product.input);
  else if (product.input.scalar_type() == at::kBFloat16 && gemm_bf16bf16f32_ != nullptr)
    accumulate_bf16(product);
  else
    accumulate_widened(product);
}

inline void run_on_cpu(const Products& products) {
  check_no_overlap(products);
  for (const Product& product : products) accumulate_on_cpu(product);
}

}  // namespace zb
