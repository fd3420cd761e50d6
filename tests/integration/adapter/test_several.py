"""The backward of stages that hand on several tensors."""

from __future__ import annotations

import torch

from megatron.zero_bubble.integration.adapter import several


def test_outputs_without_a_graph_have_no_backward() -> None:
    """As those of a first stage that is frozen."""
    assert several.backward(None, (torch.ones(2), torch.arange(3)), (torch.ones(2),)) is None


def test_the_backward_reaches_all_outputs() -> None:
    x = several.leaves((torch.ones(2), torch.arange(3), torch.ones(1)), True)
    y = 2 * x[0], x[1] + 1, torch.zeros(2)
    gradients = several.backward(several.differentiable(x), y, (torch.ones(2), torch.ones(2)))
    first, second = several.gradients_of(x, gradients)
    assert torch.equal(first, torch.full((2,), 2.0)) and torch.equal(second, torch.zeros(1))
