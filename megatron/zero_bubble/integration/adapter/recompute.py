"""Runs the forwards of checkpointed layers again ahead of their backward: an R pass.

megatron-core's checkpoint is a node of the autograd graph that keeps the inputs of a function, and calls it again in
its backward. R calls the function in the same way, then has the node call something that hands out what R computed.
So upstream's code stays as it is, and a backward without an R still computes everything itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.utils import gather_split_1d_tensor
from torch.utils.checkpoint import detach_variable


def recompute(output: Any) -> None:
    """Compute again what the checkpointed layers before ``output``, that of a forward, did not keep.

    They run in the order of the forward, because tensor-parallel ranks communicate within them.
    """
    roots = output if isinstance(output, tuple) else (output,)
    for node in sorted(_checkpoints(each.grad_fn for each in roots), key=lambda node: node._sequence_nr()):
        node.run_function = _Recomputed(node)


def _checkpoints(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of the graph behind ``roots`` that are checkpoints."""
    left = [node for node in roots if node is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if getattr(type(node), "_forward_cls", None) is random.CheckpointFunction:
            yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                left.append(before)


class _Recomputed:
    """The function of a checkpoint that has been run again; calling it connects the result to new inputs.

    Args:
        node: the checkpoint.
    """

    def __init__(self, node: Any) -> None:
        saved: tuple[Any, ...] = node.saved_tensors
        if node.distribute_saved_activations:
            first = gather_split_1d_tensor(saved[0].data).view(node.input_0_shape)
            saved = (first.requires_grad_(saved[0].requires_grad), *saved[1:])
        with random._fork_rng():
            random._set_all_rng_states(*node.rng_states)
            self._inputs = detach_variable(saved)
            with torch.enable_grad():
                outputs = node.run_function(*self._inputs)
        self._is_one = isinstance(outputs, torch.Tensor)
        self._outputs: tuple[Any, ...] = (outputs,) if self._is_one else tuple(outputs)

    def __call__(self, *inputs: Any) -> Any:
        outputs = _Connected.apply(self, *inputs)
        return outputs[0] if self._is_one else outputs

    def ends(self) -> tuple[Any, ...]:
        """The outputs without their graph."""
        return tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in self._outputs)

    def undifferentiable(self, ends: Sequence[Any]) -> Iterator[torch.Tensor]:
        for own, end in zip(self._outputs, ends, strict=True):
            if isinstance(own, torch.Tensor) and not own.requires_grad:
                yield end

    def backward(self, gradients: Sequence[Any]) -> Iterator[Any]:
        """Run the backward of the layers, free their activations, and yield the gradients of the inputs."""
        inputs, outputs = self._inputs, self._outputs
        self._inputs, self._outputs = (), ()
        pairs = zip(outputs, gradients, strict=True)
        trained = [(own, gradient) for own, gradient in pairs if isinstance(own, torch.Tensor) and own.requires_grad]
        torch.autograd.backward([own for own, _ in trained], [gradient for _, gradient in trained])
        for each in inputs:
            yield each.grad if isinstance(each, torch.Tensor) else None


class _Connected(torch.autograd.Function):
    """Returns the outputs of recomputed layers as a function of given inputs."""

    @staticmethod
    def forward(ctx: Any, recomputed: _Recomputed, *_inputs: Any) -> tuple[Any, ...]:
        ctx.recomputed = recomputed
        ends = recomputed.ends()
        ctx.mark_non_differentiable(*recomputed.undifferentiable(ends))
        return ends

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        recomputed, ctx.recomputed = ctx.recomputed, None
        return None, *recomputed.backward(gradients)
