"""Functions of recurrent layers that continue from slice to slice, in float64: equal to those of whole sequences."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.helpers.hybrid_models import STAND_INS

LENGTH, BATCH, HEADS, SIZE, WIDTH = 32, 2, 3, 5, 4
ENDS = [(16, 32), (1, 7, 8, 32), tuple(range(4, 36, 4))]
Layer = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def continued() -> Iterator[Any]:
    from megatron.zero_bubble.integration.adapter import recurrences

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_INS)
        scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
        patch.setattr(recurrences, "mamba_kernels", lambda: (scan.mamba_chunk_scan_combined, None))
        yield recurrences.Recurrences()


def layer_of(kind: str, own: Any) -> tuple[int, Layer, list[torch.Tensor]]:
    """The features of an input (batch, tokens, features), a layer that calls replaced functions, and its weights."""
    from megatron.zero_bubble.integration.adapter.recurrences import CHANNELS_FIRST, CHANNELS_LAST

    inner = HEADS * SIZE
    if kind == "scan":
        kernel = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_split_conv1d_scan_combined
        channels = inner + 2 * 4
        weights = [torch.randn(channels, WIDTH), torch.randn(channels), torch.randn(HEADS), torch.rand(HEADS)]

        def scan(x: torch.Tensor) -> torch.Tensor:
            weight, bias, skip, rates = weights
            given = {"D": skip, "chunk_size": 8, "activation": "silu", "headdim": SIZE, "ngroups": 1}
            return own.scan(kernel, x, weight, bias, torch.ones(HEADS), -rates.exp(), **given)  # type: ignore[no-any-return]

        return inner + channels + HEADS, scan, weights
    if kind == "delta rule":
        kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

        def rule(x: torch.Tensor) -> torch.Tensor:
            *parts, gates = x.split((inner, inner, inner, 2 * HEADS), -1)
            q, k, v = (functional.normalize(part.unflatten(-1, (HEADS, SIZE)), dim=-1) for part in parts)
            decay, beta = -functional.softplus(gates[..., :HEADS]), gates[..., HEADS:].sigmoid()
            given = {"initial_state": None, "output_final_state": False}
            output, state = own.delta_rule(kernel, q, k, v, g=decay, beta=beta, **given)
            assert state is None
            return output  # type: ignore[no-any-return]

        return 3 * inner + 2 * HEADS, rule, []
    weight = torch.randn(inner, 1, WIDTH)
    if kind == "convolution":

        def convolve(x: torch.Tensor) -> torch.Tensor:
            of = {"padding": WIDTH - 1, "groups": inner}
            convolved = own.convolve(CHANNELS_FIRST, functional.conv1d, x.transpose(1, 2), weight, None, **of)
            return convolved[..., : x.shape[1]]  # type: ignore[no-any-return]

        return inner, convolve, [weight]
    kernel = importlib.import_module("fla.modules.convolution").causal_conv1d

    def by_tokens(x: torch.Tensor) -> torch.Tensor:
        output, _ = own.convolve(CHANNELS_LAST, kernel, x=x, weight=weight.squeeze(1), initial_state=None)
        return output  # type: ignore[no-any-return]

    return inner, by_tokens, [weight]


@pytest.mark.parametrize("kind", ["scan", "delta rule", "convolution", "convolution by tokens"])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("twice", [False, True])
def test_outputs_and_gradients_equal_those_of_whole_sequences(
    continued: Any, kind: str, ends: tuple[int, ...], twice: bool
) -> None:
    """With ``twice``, forwards run again before their backward, as with recomputation."""
    from megatron.zero_bubble.integration.adapter.states import Place

    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        features, layer, weights = layer_of(kind, continued)
        x, factors = torch.randn(BATCH, LENGTH, features), torch.randn(10_000)
    finally:
        torch.set_default_dtype(torch.float32)
    leaves = [x, *weights]
    for leaf in leaves:
        leaf.requires_grad_()
    dimension = 2 if kind == "convolution" else 1

    def loss(y: torch.Tensor, start: int) -> torch.Tensor:
        weighed = factors[: LENGTH * 7].view(7, LENGTH)[:, start : start + y.shape[dimension]].sum(0)
        return (y.transpose(dimension, -1) * weighed).square().sum()

    loss(layer(x), 0).backward()
    expected = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    bounds, states = [*pairwise((0, *ends))], continued.states

    def forward(slice_: int) -> torch.Tensor:
        start, end = bounds[slice_]
        continued._at = lambda name: Place((0, 5), (1, name), slice_, len(ends))
        value = loss(layer(x[:, start:end]), start)
        continued._at = None
        return value

    states.in_forward = True
    values = [forward(slice_) for slice_ in range(len(ends))]
    states.in_forward = False
    assert len(states) == 1 and any(True for _ in states.tensors(0, 5)) and not [*states.tensors(1)]
    for slice_ in reversed(range(len(ends))):
        (forward(slice_) if twice else values[slice_]).backward()
    assert not states and not [*states.tensors()]
    for leaf, wanted in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, wanted, rtol=1e-10, atol=1e-10)


def test_a_gradient_within_a_forward_reaches_no_other_slice() -> None:
    from megatron.zero_bubble.integration.adapter.states import Place, States

    states, at = States(), Place((0, 0), (0, "state"), 0, 2)
    x = torch.ones(3, requires_grad=True)
    states.in_forward = True
    states.leave(at, x * 2, x * 3)
    begun = states.begun(at._replace(slice=1), (x,))
    (gradient,) = torch.autograd.grad((begun * x).sum(), x)
    states.in_forward = False
    assert gradient.tolist() == [3.0] * 3 and not states.of(at).gradients
    states.drop((0, 0))
    states.drop((0, 7))
    assert not states
