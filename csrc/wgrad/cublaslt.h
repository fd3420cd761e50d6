// The weight gradients of a CUDA rank: cuBLASLt behind a plain interface, which needs no torch.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace zb {

enum class Dtype : int32_t { kFloat, kBFloat16, kHalf };

// A row-major matrix has rows of unit stride, the other one columns; `leading` is the stride of the other dimension.
struct Matrix {
  const void* data;
  int64_t leading;
  bool is_row_major;
};

// main_grad (out, in), row-major, += grad_output (tokens, out)^T input (tokens, in).
struct Gemm {
  Matrix input, grad_output;
  void* main_grad;
  int64_t main_grad_leading;
  // Where not null, the sums (out) of grad_output over the tokens are written there; for a float32 main_grad only.
  float* bias_sum;
  int64_t tokens, in, out;
  Dtype operands, grad;
  // Whether products of float32 may be rounded to TensorFloat-32.
  bool allows_tf32;
};

// What cuBLASLt may work in; 32 MiB is NVIDIA's advice for Hopper.
constexpr size_t kWorkspaceBytes = 32u << 20;

// Queues a GEMM on the stream and returns at once; nullptr, or the sentence that says why it cannot.
//
// *sums_bias is false where cuBLASLt has no kernel that also sums the bias: then bias_sum is not written.
const char* queue_gemm(const Gemm& gemm, int device, cudaStream_t stream, void* workspace, bool* sums_bias);

}  // namespace zb
