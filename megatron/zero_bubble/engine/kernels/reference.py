"""Reference implementation of the ops of csrc/ in plain torch; it also runs if they were not built."""

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
        main_grad: (out, in), float32 or of the same dtype; updated in place.
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
    """``wgrad_accumulate`` for every item, in order; the same gradient may occur several times.

    Args:
        bias_grads: empty, or one tensor per input: (out,), or a tensor without elements if there is no bias. The sum of
            ``grad_output`` over the tokens, computed in float32, is added to each.
    """
    for i, (x, grad_output, main_grad) in enumerate(zip(inputs, grad_outputs, main_grads, strict=True)):
        wgrad_accumulate(x, grad_output, main_grad)
        if bias_grads and bias_grads[i].numel():
            bias_grads[i].add_(_flattened(grad_output).sum(0, dtype=torch.float32))


def _flattened(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
