"""The slow truth: what the ops of csrc/ compute, in plain torch. Also what runs where they were not built."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


@torch.no_grad()
def wgrad_accumulate(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """``main_grad += grad_output^T input``, accumulated in float32 and rounded once.

    Args:
        input: (..., in) of float32, bfloat16 or float16; the leading dimensions are flattened.
        grad_output: (..., out), of the same dtype and as many tokens.
        main_grad: (out, in), float32 or of the same dtype; written.
    """
    x, dy = _flattened(input), _flattened(grad_output)
    if main_grad.dtype is x.dtype:
        main_grad.addmm_(dy.t(), x)
    elif x.is_cuda:  # widening the operands would leave the tensor cores idle
        main_grad.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))
    else:
        main_grad.addmm_(dy.t().float(), x.float())


@torch.no_grad()
def wgrad_accumulate_many(
    inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor], main_grads: Sequence[Tensor], bias_grads: Sequence[Tensor]
) -> None:
    """``wgrad_accumulate`` of each, in order; a gradient may come several times.

    Args:
        bias_grads: (out,) for each input, or of no elements where it has no bias; or none at all. Each gets the sum of
            its ``grad_output`` over the tokens, taken in float32.
    """
    for i, (x, grad_output, main_grad) in enumerate(zip(inputs, grad_outputs, main_grads, strict=True)):
        wgrad_accumulate(x, grad_output, main_grad)
        if bias_grads and bias_grads[i].numel():
            bias_grads[i].add_(_flattened(grad_output).sum(0, dtype=torch.float32))


def _flattened(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
