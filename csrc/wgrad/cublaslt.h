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

enum class Result {
  kQueued,
  kRefused,  // nothing was queued, so that main_grad can be computed in another way
  kFailed,   // the contents of main_grad are unknown
};

struct Outcome {
  Result result;
  // Whether bias_sum is computed as well; otherwise it is not written.
  bool sums_bias;
  // Why the GEMM was refused or failed.
  const char* why;
};

// Queues a GEMM on the stream and returns at once. The sums of the bias are part of it if cuBLASLt has a kernel for that.
Outcome queue_gemm(const Gemm& gemm, int device, cudaStream_t stream, void* workspace);

}  // namespace zb
