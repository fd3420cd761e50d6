"""Clauses of ``engine.wgrad.contract`` in whole models, where ``tests/engine/wgrad`` has no linear of its own.

The gradients of slices are added up, T computes that of the divided output layer, and those of sharded units go to
buffers that come and go. Whatever someone does to the model from outside must have the effect that it has with stock.
The clauses about operands have no rows: slices and units have the linears of the other test, and nobody outside can
write to what T takes, which are copies that its rank has received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers import parity, slices, vocabulary
from tests.helpers.parity import Layout, assert_same_bits
from tests.helpers.ranks import RankFailure, RankPool
from tests.helpers.slices import LONG, Difference
from tests.integration.adapter.test_parity import UNTIED

MICROBATCHES, SLICES = 4, 2


class Kind(NamedTuple):
    """Where the gradients of weights are not made by the linears alone.

    Attributes:
        options: flags of the job.
        schedule: the schedule with its flags.
        gradients: computes the gradients of one iteration.
        calls: how often the hooks of a weight are called per microbatch.
    """

    options: str
    schedule: str
    gradients: Callable[..., Any]
    calls: int = 1


KINDS = {
    "slices": Kind(LONG, f"seq-zb-h1 --zero-bubble-num-slices {SLICES}", slices.gradients_of, calls=SLICES),
    "vocabulary, algorithm 1": Kind(UNTIED, "zb-h1 --zero-bubble-vocabulary-parallel 1", vocabulary.whole_gradients_of),
    "vocabulary, algorithm 2": Kind(UNTIED, "zb-h1 --zero-bubble-vocabulary-parallel 2", vocabulary.whole_gradients_of),
}
UNITS = (
    Layout(2, data=2, num_layers=4),
    "--use-distributed-optimizer --num-virtual-stages-per-pipeline-rank 2 --train-iters 2 --eval-iters 0",
    "zero-pp --zero-bubble-shard-weights --zero-bubble-unit-microbatches",
)
FUSED = "--zero-bubble-fuse-wgrad"


def hooked(chunks: Sequence[torch.nn.Module]) -> Counter[str]:
    """Scale the gradient of every weight by a factor of its own, and count the calls of hooks before and after."""
    calls: Counter[str] = Counter()
    for name, weight in parity._named(chunks):
        factor = (1.0, 0.5, 2.0)[len(name) % 3]

        def scale(grad: torch.Tensor, name: str = name, factor: float = factor) -> torch.Tensor:
            calls[f"before {name}"] += 1
            return grad * factor

        def after(_: Any, name: str = name) -> None:
            calls[f"after {name}"] += 1

        weight.register_hook(scale)
        weight.register_post_accumulate_grad_hook(after)
    return calls


def asking(chunks: Sequence[torch.nn.Module]) -> Counter[str]:
    """In every forward, ask for gradients of the weights and of the output of the layers, and drop them."""
    calls: Counter[str] = Counter()

    def ask(layers: torch.nn.Module, _: Any, output: torch.Tensor) -> None:
        (part,) = torch.autograd.grad(output.square().sum(), output, retain_graph=True)
        grads = torch.autograd.grad(output, list(layers.parameters()), part, retain_graph=True)
        assert all(bool(grad.any()) for grad in grads)
        calls["asked"] += 1

    for layers in layers_of(chunks):
        layers.register_forward_hook(ask)
    return calls


def backward_within(chunks: Sequence[torch.nn.Module]) -> None:
    def run(_layers: torch.nn.Module, _: Any, output: torch.Tensor) -> None:
        output.sum().backward(retain_graph=True)

    for layers in layers_of(chunks):
        layers.register_forward_hook(run)


def layers_of(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    from megatron.core.utils import get_attr_wrapped_model

    return [get_attr_wrapped_model(chunk, "decoder") for chunk in chunks]


def gradients(
    rank: int, name: str, flags: str, schedules: Sequence[str | None], prepare: Callable[..., Any]
) -> list[tuple[Any, Any]]:
    """The gradients of one iteration under each schedule, and what ``prepare`` returned."""
    start, found = None, []
    for args, _ in parity._under_each(flags, schedules):
        notes: list[Any] = []
        own, start = KINDS[name].gradients(args, start, lambda chunks, to=notes: to.append(prepare(chunks)))
        found.append((own, notes[0]))
    return found


def trained(rank: int, flags: str, schedules: Sequence[str | None], prepare: Callable[..., Any]) -> list[Any]:
    """The outcome of training under each schedule, and what ``prepare`` returned."""
    start, found = None, []
    for args, pipeline in parity._under_each(flags, schedules):
        notes: list[Any] = []
        splits = parity._splits(args)
        own, start = parity._train_once(
            args, splits, start, pipeline, lambda chunks, _, to=notes: to.append(prepare(chunks))
        )
        found.append((own, notes[0]))
    return found


ROWS = [
    pytest.param(name, fused, marks=() if number % 2 == 0 else pytest.mark.full, id=f"{name}, {mode}")
    for number, (name, (fused, mode)) in enumerate(product(KINDS, (("", "exact"), (FUSED, "fused"))), 1)
]


@pytest.mark.parametrize("prepare", [hooked, asking])
@pytest.mark.parametrize(("name", "fused"), ROWS)
def test_gradients_and_calls_are_those_of_stock(
    ranks: RankPool, name: str, fused: str, prepare: Callable[..., Any]
) -> None:
    """Up to sums that are rounded in another order, in float32; slices are called one by one."""
    kind = KINDS[name]
    flags = Layout(2).flags(MICROBATCHES, f"{kind.options} {fused}")
    for (stock, expected), (own, calls) in ranks.run(
        2, gradients, name, flags, [None, kind.schedule], prepare, timeout=120
    ):
        assert set(expected.values()) == {MICROBATCHES} and calls.keys() >= expected.keys()
        assert set(calls.values()) == {MICROBATCHES * kind.calls}
        difference = Difference.between(own if name == "slices" else vocabulary._without_padding(own, stock), stock)
        assert max(difference) <= 2e-6, difference


@pytest.mark.parametrize("name", KINDS)
def test_a_backward_within_a_forward_is_refused(ranks: RankPool, name: str) -> None:
    flags = Layout(2).flags(MICROBATCHES, KINDS[name].options)
    with pytest.raises(RankFailure, match="only the schedule's own backward accumulates gradients"):
        ranks.run(2, gradients, name, flags, [KINDS[name].schedule], backward_within, timeout=120)


@pytest.mark.parametrize("prepare", [hooked, asking])
@pytest.mark.parametrize(
    "fused", [pytest.param("", id="exact"), pytest.param(FUSED, marks=pytest.mark.full, id="fused")]
)
def test_units_have_the_bits_of_plain_data_parallelism(
    ranks: RankPool, prepare: Callable[..., Any], fused: str
) -> None:
    layout, options, schedule = UNITS
    runs = [f"zero-pp --zero-bubble-unit-microbatches {MICROBATCHES}" if fused else None, f"{schedule} {MICROBATCHES}"]
    flags = layout.flags(MICROBATCHES, f"{options} {fused}")
    found = ranks.run(layout.num_ranks, trained, flags, runs, prepare, timeout=200)
    assert_same_bits([[outcome for outcome, _ in of_rank] for of_rank in found], runs, steps=2)
    for (_, expected), (_, calls) in found:
        assert calls == expected and calls
