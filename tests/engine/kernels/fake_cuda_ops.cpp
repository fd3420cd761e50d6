// The CUDA ops on tensors of the CPU, with the fake cuBLASLt, and their workspaces, with streams that are only numbers.

#include <torch/library.h>

#include "../../csrc/wgrad/checks.h"
#include "../../csrc/wgrad/cuda.h"
#include "../../csrc/wgrad/parse.h"
#include "../../csrc/wgrad/stream.h"

// Stream 9 is being captured.
extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool is_captured = reinterpret_cast<intptr_t>(stream) == 9;
  *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

static void run(const zb::Products& products) {
  zb::check_no_overlap(products);
  for (const zb::Product& product : products) zb::accumulate_on_cuda(product, nullptr, nullptr);
}

static at::Tensor workspace_of(int64_t stream) {
  return zb::workspace_of(at::kCPU, reinterpret_cast<cudaStream_t>(stream), 64);
}

TORCH_LIBRARY(fake_cuda, library) {
  library.def("workspace_of(int stream) -> Tensor", &workspace_of);
  library.def("wgrad_accumulate(Tensor input, Tensor grad_output, Tensor(a!) main_grad) -> ()");
  library.def(
      "wgrad_accumulate_many(Tensor[] inputs, Tensor[] grad_outputs, Tensor(a!)[] main_grads, "
      "Tensor(b!)[] bias_grads) -> ()");
}

TORCH_LIBRARY_IMPL(fake_cuda, CPU, library) { zb::register_kernels<run>(library); }
