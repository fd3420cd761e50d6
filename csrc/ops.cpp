// The ops of the deferred weight gradients: their schemas and their CPU implementation.
//
// Their reference implementation is megatron/zero_bubble/engine/kernels/reference.py. These ops call no Python, so
// torch releases the GIL while one runs.

#include <torch/library.h>

#include "wgrad/checks.h"
#include "wgrad/cpu.h"
#include "wgrad/parse.h"

TORCH_LIBRARY(zero_bubble, library) {
  library.def("wgrad_accumulate(Tensor input, Tensor grad_output, Tensor(a!) main_grad) -> ()");
  library.def(
      "wgrad_accumulate_many(Tensor[] inputs, Tensor[] grad_outputs, Tensor(a!)[] main_grads, "
      "Tensor(b!)[] bias_grads) -> ()");
}

TORCH_LIBRARY_IMPL(zero_bubble, CPU, library) { zb::register_kernels<zb::run_on_cpu>(library); }

// On tensors without data there is nothing to compute, and no result to describe.
static void compute_nothing(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

TORCH_LIBRARY_IMPL(zero_bubble, Meta, library) {
  for (const char* name : {"wgrad_accumulate", "wgrad_accumulate_many"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_nothing>());
}
