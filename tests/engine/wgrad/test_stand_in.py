"""Stand-in gradients share one zero that nobody can change."""

from __future__ import annotations

import pytest
import torch

from megatron.zero_bubble.engine.wgrad.stand_in import stand_in_grad


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (5,)])
def test_stand_ins_share_memory_that_torch_refuses_to_add_to(shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(torch.randn(shape))
    one, other = stand_in_grad(parameter), stand_in_grad(torch.randn(7))
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert torch.equal(one, torch.zeros(shape))
    with pytest.raises(RuntimeError, match="single memory location"):
        one.add_(1.0)
    parameter.grad = one
    with pytest.raises(RuntimeError, match="single memory location"):
        (parameter * 2.0).sum().backward()  # autograd adds to the gradient that is there
    assert torch.equal(stand_in_grad(parameter), torch.zeros(shape))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_parameter_of_one_element_cannot_change_the_stand_in_of_others(shape: tuple[int, ...]) -> None:
    scale, other = torch.nn.Parameter(torch.ones(shape)), torch.nn.Parameter(torch.ones(1))
    scale.grad, other.grad = stand_in_grad(scale), stand_in_grad(other)
    (scale * 2.0).sum().backward()  # a real gradient, added in place to the stand-in
    assert scale.grad.sum() == 2.0
    for parameter in (other, scale, torch.ones(3)):
        assert not stand_in_grad(parameter).any()
    assert not other.grad.any()


def test_stand_in_has_the_dtype_of_its_parameter() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        parameter = torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))
        parameter.grad = stand_in_grad(parameter)  # torch refuses a gradient of another dtype
        assert parameter.grad.dtype is dtype


def test_parameter_without_elements_has_a_stand_in() -> None:
    assert stand_in_grad(torch.empty(0, 3)).shape == (0, 3)
