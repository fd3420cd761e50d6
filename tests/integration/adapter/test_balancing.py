"""The losses that balance experts: values and gradients of slices add up to those of the whole sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

ENDS = (3, 4, 10)
EXPERTS = 4


def run(kinds: tuple[str, ...], repeats: bool = False) -> tuple[float, torch.Tensor, int]:
    """Sum of the losses of all slices, by their tokens; gradient of the probabilities; what is kept afterwards.

    With ``repeats``, only the backwards have the losses, as with recomputation.
    """
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func as original

    from megatron.zero_bubble.integration.adapter.balancing import Balancing

    balancing, losses = Balancing(), []
    probabilities, chosen, common = _tokens()
    router = SimpleNamespace(get_aux_loss_coeff=lambda kind: 0.01 if kind in kinds else 0)
    bounds = [*zip((0, *ENDS), ENDS, strict=False)]

    def loss(slice_: int, is_forward: bool) -> torch.Tensor:
        start, end = bounds[slice_]
        share, tokens = (end - start) / ENDS[-1], chosen[start:end].sum(0)
        with balancing.at((1, 7), slice_, share, is_forward):
            balancing.routes(5, router)
            of_slice = {"tokens_per_expert": tokens, "total_num_tokens": end - start}
            return share * balancing.loss(original, probs=probabilities[start:end], **of_slice, **common)

    if not repeats:
        losses = [loss(slice_, True) for slice_ in range(len(ENDS))]
    for slice_ in reversed(range(len(ENDS))):
        if repeats:
            losses.append(loss(slice_, False))
            losses[-1].backward()
        else:
            with balancing.at((1, 7), slice_, 1.0, False):
                losses[slice_].backward()
    assert probabilities.grad is not None
    return sum(float(each.detach()) for each in losses), probabilities.grad, len(balancing)


def _tokens() -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    logits = torch.randn(ENDS[-1], EXPERTS, generator=torch.Generator().manual_seed(3))
    probabilities = logits.softmax(1).requires_grad_()
    chosen = torch.zeros_like(logits, dtype=torch.int64).scatter(1, logits.topk(2).indices, 1)
    return probabilities, chosen, {"topk": 2, "num_experts": EXPERTS, "moe_aux_loss_coeff": 0.01}


def _whole() -> tuple[float, torch.Tensor]:
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func as original

    probabilities, chosen, common = _tokens()
    loss = original(probs=probabilities, tokens_per_expert=chosen.sum(0), total_num_tokens=ENDS[-1], **common)
    loss.backward()
    assert probabilities.grad is not None
    return float(loss.detach()), probabilities.grad


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_slices_add_up_to_the_sequence(kind: str) -> None:
    (value, gradient), (own_value, own_gradient, kept) = _whole(), run((kind,))
    assert own_value == pytest.approx(value, rel=1e-6) and kept == 0
    torch.testing.assert_close(own_gradient, gradient, rtol=1e-6, atol=1e-9)


def test_slices_that_are_routed_again_have_losses_of_their_own() -> None:
    (value, gradient), (own_value, own_gradient, kept) = _whole(), run(("aux_loss",), repeats=True)
    assert own_value == pytest.approx(value, rel=0.2) and kept == 0
    assert 1e-3 < float((own_gradient - gradient).norm() / gradient.norm()) < 0.5


def test_numbers_of_tokens_stay_integers() -> None:
    """As TransformerEngine's fused loss demands."""
    from megatron.zero_bubble.integration.adapter.balancing import Balancing

    balancing, numbers = Balancing(), []

    def original(*, probs: torch.Tensor, total_num_tokens: int, **_: object) -> torch.Tensor:
        numbers.append(total_num_tokens)
        return probs.sum()

    with balancing.at((1, 7), 0, 3 / 11, True):
        balancing.routes(5, SimpleNamespace(get_aux_loss_coeff=lambda kind: float(kind == "aux_loss")))
        probabilities = torch.ones(3, EXPERTS, requires_grad=True)
        of_slice = {"tokens_per_expert": torch.ones(EXPERTS), "total_num_tokens": 3}
        loss = balancing.loss(original, probs=probabilities, **of_slice)
    with balancing.at((1, 7), 0, 1.0, False):
        loss.backward()
    assert [(type(number), number) for number in numbers] == [(int, 11), (int, 3)]


def test_a_loss_of_all_tokens_so_far_is_that_of_the_slice() -> None:
    assert run(("global_aux_loss",))[0] == pytest.approx(run((), repeats=True)[0], rel=1e-6)
