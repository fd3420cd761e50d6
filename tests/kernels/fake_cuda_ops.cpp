// The CUDA ops on tensors of the CPU, with the fake cuBLASLt.

#include <torch/library.h>

#include "../../csrc/wgrad/checks.h"
#include "../../csrc/wgrad/cuda.h"
#include "../../csrc/wgrad/parse.h"

static void run(const zb::Products& products) {
  zb::check_no_overlap(products);
  for (const zb::Product& product : products) zb::accumulate_on_cuda(product, nullptr, nullptr);
}

TORCH_LIBRARY(fake_cuda, library) {
  library.def("wgrad_accumulate(Tensor input, Tensor grad_output, Tensor(a!) main_grad) -> ()");
  library.def(
      "wgrad_accumulate_many(Tensor[] inputs, Tensor[] grad_outputs, Tensor(a!)[] main_grads, "
      "Tensor(b!)[] bias_grads) -> ()");
}

TORCH_LIBRARY_IMPL(fake_cuda, CPU, library) { zb::register_kernels<run>(library); }
