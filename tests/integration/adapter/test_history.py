"""Keys and values of earlier slices: gradients equal those of concatenated slices, and nothing is kept afterwards."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

LENGTH = 32


def run(ends: tuple[int, ...], dtype: torch.dtype, twice: bool = False) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the gradients of keys and values, and how many microbatches have a history after the last backward.

    The value of a slice depends on all keys and values up to its end. With ``twice``, forwards run again before their
    backward, as with recomputation.
    """
    from megatron.zero_bubble.integration.adapter.history import Histories

    torch.manual_seed(3)
    keys, values, factors = (torch.randn(LENGTH, 2, 4).to(dtype) for _ in range(3))
    keys.requires_grad_()
    values.requires_grad_()
    histories, losses = Histories(), []

    def forward(slice_: int) -> torch.Tensor:
        start, end = [*pairwise((0, *ends))][slice_]
        k, v = histories.extend((0, 5), 1, ends, slice_, (keys[start:end], values[start:end]))
        return ((k * factors[:end]).sum(0) * (v * factors[:end]).sum(0)).sum() * (slice_ + 1)

    for slice_ in range(len(ends)):
        losses.append(forward(slice_))
    for slice_ in reversed(range(len(ends))):
        assert len(histories) == 1
        (forward(slice_) if twice else losses[slice_]).backward()
    assert keys.grad is not None and values.grad is not None
    return keys.grad, values.grad, len(histories)


def expected(ends: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    keys, values, factors = (torch.randn(LENGTH, 2, 4) for _ in range(3))
    keys.requires_grad_()
    values.requires_grad_()
    for slice_, end in enumerate(ends):
        k, v = keys[:end] * factors[:end], values[:end] * factors[:end]
        ((k.sum(0) * v.sum(0)).sum() * (slice_ + 1)).backward()
    return [gradient for gradient in (keys.grad, values.grad) if gradient is not None]


@pytest.mark.parametrize("ends", [(32,), (16, 32), (1, 7, 8, 32), tuple(range(2, 34, 2))])
@pytest.mark.parametrize("twice", [False, True])
def test_gradients_equal_those_of_concatenated_slices(ends: tuple[int, ...], twice: bool) -> None:
    *found, left = run(ends, torch.float32, twice)
    assert left == 0
    for gradient, wanted in zip(found, expected(ends), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-4)


def test_many_slices_are_summed_in_float32() -> None:
    from megatron.zero_bubble.integration.adapter.history import Histories

    for num_slices, wide in ((8, False), (9, True)):
        ends, histories = tuple(range(1, num_slices + 1)), Histories()
        rows = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
        outputs = [histories.extend((0, 0), 0, ends, at, (rows, rows))[0] for at in range(num_slices)]
        outputs[-1].sum().backward()
        gradients = list(histories.tensors(0))[2:]
        assert [g.dtype for g in gradients] == [torch.float32 if wide else torch.bfloat16] * 2
        assert rows.grad is not None and rows.grad.dtype is torch.bfloat16


def test_histories_of_other_microbatches_stay() -> None:
    from megatron.zero_bubble.integration.adapter.history import Histories

    histories = Histories()
    rows = torch.ones(2, 1, 1)
    for of in ((0, 0), (0, 1), (1, 0)):
        histories.extend(of, 0, (2, 4), 0, (rows, rows))
    histories.drop((0, 0))
    histories.drop((0, 7))
    assert len(histories) == 2 and len(list(histories.tensors(0))) == 2
    histories.clear()
    assert not histories and not list(histories.tensors())


def test_a_gradient_within_a_forward_is_that_of_the_own_rows_and_leaves_no_trace() -> None:
    from megatron.zero_bubble.integration.adapter.history import Histories

    histories, ends = Histories(), (3, 5)
    rows = [torch.randn(end - start, 2, 4).requires_grad_() for start, end in pairwise((0, *ends))]
    for slice_, own in enumerate(rows):
        histories.in_forward = True
        keys, values = histories.extend((0, 0), 0, ends, slice_, (own, own.sin()))
        (grad,) = torch.autograd.grad((keys * values.square()).sum(), own)
        histories.in_forward = False
        torch.testing.assert_close(grad, own.sin().square() + 2 * own * own.sin() * own.cos())
    assert histories.get((0, 0), 0).gradients == ()
