// Weight gradients on CUDA: an interface to cuBLASLt that is independent of torch.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace zb {

enum class Dtype : int32_t { kFloat, kBFloat16, kHalf };

// A row-major matrix has unit stride along rows, a column-major one along columns; `leading` is the other stride.
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
  // If not null, receives the sums (out) of grad_output over the tokens; only with a float32 main_grad.
  float* bias_sum;
  int64_t tokens, in, out;
  Dtype operands, grad;
  // Whether float32 operands may be rounded to TensorFloat-32.
  bool allows_tf32;
};

// Workspace size for cuBLASLt; NVIDIA recommends 32 MiB for Hopper.
constexpr size_t kWorkspaceBytes = 32u << 20;

// Queues a GEMM on the stream and returns at once. Returns nullptr, or an error message if it cannot be queued.
//
// *sums_bias is set to false if cuBLASLt has no kernel that also sums the bias; bias_sum is then not written.
const char* queue_gemm(const Gemm& gemm, int device, cudaStream_t stream, void* workspace, bool* sums_bias);

}  // namespace zb
