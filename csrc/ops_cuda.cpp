// The ops of the deferred weight gradients on CUDA: host code that queues kernels of cuBLASLt, so that it compiles with
// CUDA's headers alone.

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "wgrad/checks.h"
#include "wgrad/cuda.h"
#include "wgrad/parse.h"
#include "wgrad/stream.h"

namespace zb {
namespace {

void run_on_cuda(const Products& products) {
  check_no_overlap(products);
  if (products.empty()) return;
  const at::Device device = products[0].input.device();
  const c10::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const at::Tensor workspace = workspace_of(device, stream, kWorkspaceBytes);
  for (const Product& product : products) accumulate_on_cuda(product, stream, workspace.mutable_data_ptr());
}

}  // namespace
}  // namespace zb

TORCH_LIBRARY_IMPL(zero_bubble, CUDA, library) { zb::register_kernels<zb::run_on_cuda>(library); }
