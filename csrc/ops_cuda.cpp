// The ops of the deferred weight gradients on CUDA: host code that queues kernels of cuBLASLt, so that it compiles with
// CUDA's headers alone.

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "wgrad/checks.h"
#include "wgrad/cublaslt.h"
#include "wgrad/operand.h"
#include "wgrad/parse.h"
#include "wgrad/stream.h"

namespace zb {
namespace {

Dtype dtype_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat       ? Dtype::kFloat
         : tensor.scalar_type() == at::kBFloat16 ? Dtype::kBFloat16
                                                  : Dtype::kHalf;
}

Matrix matrix_of(const at::Tensor& tensor) {
  const Operand operand(tensor);
  return {tensor.const_data_ptr(), operand.leading, operand.is_row_major};
}

void run_on_cuda(const Products& products) {
  check_no_overlap(products);
  if (products.empty()) return;
  const at::Device device = products[0].input.device();
  const c10::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  // From torch's allocator, which hands it out again only to later work of this stream.
  const at::Tensor workspace =
      products[0].input.new_empty({static_cast<int64_t>(kWorkspaceBytes)}, at::TensorOptions().dtype(at::kByte));
  for (const Product& product : products) {
    const int64_t tokens = product.input.size(0), in = product.input.size(1), out = product.grad_output.size(1);
    if (tokens == 0 || out == 0) continue;
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
          at::globalContext().allowTF32CuBLAS()};
      const char* problem =
          queue_gemm(gemm, device.index(), stream, workspace.mutable_data_ptr(), &sums_bias);
      TORCH_CHECK(
          problem == nullptr, "the weight gradient of ", product.input.sizes(), " and ", product.grad_output.sizes(),
          " cannot be queued: ", problem, "; use --no-zero-bubble-fuse-wgrad to compute it in torch");
      product.main_grad.unsafeGetTensorImpl()->bump_version();
    }
    if (product.bias_grad.defined())
      product.bias_grad.add_(sums_bias ? bias_sum : product.grad_output.sum(0, false, at::kFloat));
  }
}

}  // namespace
}  // namespace zb

TORCH_LIBRARY_IMPL(zero_bubble, CUDA, library) { zb::register_kernels<zb::run_on_cuda>(library); }
