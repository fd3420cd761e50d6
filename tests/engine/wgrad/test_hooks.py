"""Hooks on the parameters of a model in training: called as often as by stock, with the same effect."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from megatron.zero_bubble.core.errors import UserError
from tests.engine.wgrad.test_fused import figures
from tests.engine.wgrad.test_transformer_engine_parity import engine_layers
from tests.helpers.parity import Layout, Outcome, assert_same_bits, assert_same_model, train
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some

UNTIED = "--untie-embeddings-and-output-weights"
OVERLAP = f"--overlap-grad-reduce --no-align-grad-reduce --ddp-bucket-size 1000 {UNTIED}"
ROWS: dict[str, tuple[Layout, list[str | None], str, bool]] = {
    "overlap, zb-h1, zb-h2": (Layout(2, data=2), [None, "zb-h1", "zb-h2"], OVERLAP, False),
    "experts": (Layout(2), [None, "zb-h1"], f"--num-experts 4 --swiglu --disable-bias-linear {UNTIED}", False),
    "tied, tp=2": (Layout(2, tensor=2), [None, "zb-h1"], "--sequence-parallel", False),
    "on a V": (Layout(2, num_layers=4), [None, "zb-v"], UNTIED, False),
    "layers of TransformerEngine": (Layout(2, data=2), [None, "zb-h1"], OVERLAP, True),
}


@contextmanager
def hooked_models() -> Iterator[list[Counter[str]]]:
    """Every parameter that is wrapped for data parallelism gets hooks, which change its gradient; counted per chunk."""
    from megatron.core.distributed import DistributedDataParallel

    wrap, counts = DistributedDataParallel.__init__, []

    @functools.wraps(wrap)
    def init(ddp: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **named: Any) -> None:
        wrap(ddp, config, ddp_config, module, *args, **named)
        counts.append(Counter())
        for parameter in module.parameters():
            parameter.register_hook(halving(counts[-1]))
            parameter.register_post_accumulate_grad_hook(counting(counts[-1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "__init__", init)
        yield counts


def halving(calls: Counter[str]) -> Callable[[Any], Any]:
    def hook(grad: Any) -> Any:
        calls["before"] += 1
        return grad * (grad.abs() > grad.abs().mean()) / 2  # no linear function of it

    return hook


def counting(calls: Counter[str]) -> Callable[[Any], None]:
    def hook(_: Any) -> None:
        calls["after"] += 1

    return hook


def train_hooked(
    rank: int, flags: str, schedules: Sequence[str | None], with_engine: bool
) -> tuple[list[Outcome], list[Counter[str]]]:
    """Train with each schedule; return the outcomes, and the calls of hooks on the chunks of all runs."""
    with engine_layers(False, False) if with_engine else nullcontext(), hooked_models() as counts:
        return train(rank, flags, schedules), counts


@pytest.mark.parametrize(
    "layout, schedules, options, with_engine",
    some(ROWS.values(), ROWS["overlap, zb-h1, zb-h2"], ROWS["layers of TransformerEngine"]),
    ids=ROWS,
)
def test_hooks_of_all_parameters_have_the_effect_of_stock(
    ranks: RankPool, layout: Layout, schedules: list[str | None], options: str, with_engine: bool
) -> None:
    results = ranks.run(layout.num_ranks, train_hooked, layout.flags(3, options), schedules, with_engine, timeout=200)
    outcomes = [of_rank for of_rank, _ in results]
    if "zb-v" in schedules:
        assert_same_model(outcomes, schedules, layout)
    else:
        assert_same_bits(outcomes, schedules)
    stock = sum((counts[0] for _, counts in results), Counter())
    own = sum((count for _, counts in results for count in counts[1:]), Counter())
    assert stock["before"] == stock["after"] > 0
    assert own == {what: number * (len(schedules) - 1) for what, number in stock.items()}


def test_hooks_see_the_rounded_gradient_of_a_microbatch_in_the_default_mode(ranks: RankPool) -> None:
    flags = Layout(2).flags(3, f"--zero-bubble-fuse-wgrad {UNTIED}")
    results = ranks.run(2, train_hooked, flags, [None, "zb-h1"], False, timeout=200)
    for (stock, own), (of_stock, of_own) in results:
        assert figures(own.losses) == pytest.approx(figures(stock.losses), rel=1e-5)
        assert own.weights == stock.weights, "through autograd, the gradients are those of stock"
        assert of_own == of_stock


@pytest.mark.parametrize("options", ["", "--zero-bubble-recompute logits"])
def test_hooks_of_a_divided_vocabulary_see_the_gradient_of_a_microbatch(ranks: RankPool, options: str) -> None:
    """T computes it in blocks of tokens, if it computes the logits again."""
    schedules = [f"zb-h1 --zero-bubble-vocabulary-parallel 1 {options}"]
    results = ranks.run(2, train_hooked, Layout(2).flags(3, UNTIED), schedules, False, timeout=200)
    for (outcome,), (calls,) in results:
        num_calls = 5 * 3 * len(outcome.weights)  # five steps of three microbatches
        assert calls == {"before": num_calls, "after": num_calls}


def train_with_hooks_on_whole_layers(rank: int, flags: str) -> str:
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    made = VocabParallelEmbedding.__init__

    @functools.wraps(made)
    def init(embedding: Any, *args: Any, **named: Any) -> None:
        made(embedding, *args, **named)
        embedding.weight.register_hook(lambda grad: grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VocabParallelEmbedding, "__init__", init)
        with pytest.raises(UserError) as raised:
            train(rank, flags, ["zb-h1 --zero-bubble-vocabulary-parallel 1"])
    return str(raised.value)


def test_hooks_on_layers_that_are_divided_are_refused_on_all_ranks(ranks: RankPool) -> None:
    said = ranks.run(2, train_with_hooks_on_whole_layers, Layout(2).flags(3, UNTIED), timeout=200)
    assert all("got hooks on the old ones, which would be lost; register them on the new ones" in one for one in said)
