"""Train with CUDA graphs of a fake TransformerEngine: equal bit for bit to eager layers under stock 1F1B.

The helper that captures is megatron-core's own. After the first iteration, layers replay graphs of slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.helpers import engine
from tests.helpers.engine_layers import Wrapper, with_engine
from tests.helpers.graphed_engine import graphs_on_cpu
from tests.helpers.parity import Layout, Outcome, _splits, _train_once, _under_each, assert_same_bits, assert_same_model
from tests.helpers.ranks import RankFailure, RankPool
from tests.helpers.rows import some

NO_BIAS = "--disable-bias-linear --untie-embeddings-and-output-weights --bf16"


@contextmanager
def graphed(scopes: Sequence[str], fused: bool, release: str) -> Iterator[list[Any]]:
    """Layers of the fake engine in this context; yields the helpers that have captured."""
    from megatron.core.transformer import enums
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    from pretrain import loop, model

    count, helpers, seen = [0], [], set()
    build_config, spec, passes = model.build_config, model._layer_spec, loop.Trainer._passes

    def with_graphs(args: Any, device: Any) -> Any:
        config = build_config(args, device)
        if getattr(args, "zero_bubble", None) is not None:
            config.cuda_graph_impl = "transformer_engine"
            kind = getattr(enums, "CudaGraphModule", None) or enums.CudaGraphScope
            name = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
            setattr(config, name, [kind[scope] for scope in scopes])
        return config

    def capture_first(trainer: Any, batches: Any, share: Any, forward_only: bool = False) -> Any:
        chunks = trainer.trained.model
        if not forward_only and chunks[0].config.cuda_graph_impl != "none":
            if id(chunks) in seen and not getattr(trainer, "captured", False):
                count[0] = share.num_microbatches
                helper = TECudaGraphHelper(
                    chunks, chunks[0].config, trainer.args.seq_length, trainer.args.micro_batch_size,
                    [trainer.trained.optimizer],
                )  # fmt: skip
                helper.create_cudagraphs()
                helpers.append(helper)
                trainer.captured = True
            seen.add(id(chunks))
        return passes(trainer, batches, share, forward_only)

    with engine.installed(release), graphs_on_cpu(lambda: count[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wrapper, "fused", fused)
        patch.setattr(Wrapper, "fp8_layers", False)
        patch.setattr(model, "_layer_spec", lambda *args: with_engine(spec(*args)))
        patch.setattr(model, "build_config", with_graphs)
        patch.setattr(loop.Trainer, "_passes", capture_first)
        yield helpers


def train(
    rank: int, flags: str, schedules: Sequence[str | None], scopes: Sequence[str], fused: bool, release: str
) -> tuple[list[Outcome], list[int], int]:
    """Train; return the outcomes, the graphs of a layer for each schedule that has some, and the replays of W."""
    from megatron.zero_bubble.engine.wgrad.graphed import ReplayedGradients

    start, outcomes, numbers, run, ran = None, [], [], ReplayedGradients.run, []
    with pytest.MonkeyPatch.context() as patch, graphed(scopes, fused, release) as helpers:
        patch.setattr(ReplayedGradients, "run", lambda self: (ran.append(self), run(self))[1])
        for args, pipeline in _under_each(flags, schedules):
            outcome, start = _train_once(args, _splits(args), start, pipeline)
            outcomes.append(outcome)
        for helper in helpers:
            numbers.append(len(helper.flattened_callables[0].cuda_graphs[0]._graphs))
    return outcomes, numbers, len(ran)


EXPERTS = f"--num-experts 4 --moe-aux-loss-coeff 0.01 {NO_BIAS} --overlap-grad-reduce --no-align-grad-reduce"
PARTS = ["attn", "moe_router"]
# Schedules, scopes, release of TransformerEngine, layout, flags, graphs of a layer by rank.
ROWS = {
    "W inside": (["zb-h1"], [], "2.8.0", Layout(2, num_layers=4), NO_BIAS, [2, 2]),
    "W apart": (["zb-h1"], [], "2.13.0", Layout(2, num_layers=4), NO_BIAS, [2, 2]),
    "biases, W inside": (["zb-h2"], [], "2.13.0", Layout(2, num_layers=4), "--bf16", [3, 3]),
    "V, W apart": (["zb-v"], [], "2.13.0", Layout(2, num_layers=4), NO_BIAS, None),
    "V, W inside": (["zb-v"], [], "2.8.0", Layout(2, num_layers=4), NO_BIAS, None),
    "several stages, W apart": (["zb-interleaved"], [], "2.13.0", Layout(2, num_layers=4), NO_BIAS, None),
    "several stages, attention": (["zb-interleaved"], ["attn"], "2.13.0", Layout(2, num_layers=4), NO_BIAS, None),
    "experts, W apart": (["zb-h1"], PARTS, "2.13.0", Layout(2, data=2), EXPERTS, [2, 2, 2, 2]),
    "experts, W inside": (["zb-h1"], PARTS, "2.8.0", Layout(2, data=2), EXPERTS, [2, 2, 2, 2]),
}


@pytest.mark.parametrize("name", some(ROWS, "W inside", "V, W apart", "experts, W apart", "several stages, attention"))
def test_same_bits(ranks: RankPool, name: str) -> None:
    schedules, scopes, release, layout, options, numbers = ROWS[name]
    schedules = [None, *schedules]
    flags = layout.flags(4, options)
    results = ranks.run(layout.num_ranks, train, flags, schedules, scopes, True, release, timeout=300)
    outcomes = [own for own, _, _ in results]
    assert all((num_ran > 0) == ("W apart" in name or "attention" in name) for _, _, num_ran in results)
    if numbers is None:
        assert_same_model(outcomes, schedules, layout)
    else:
        assert_same_bits(outcomes, schedules)
        assert [number for _, (number,), _ in results] == numbers


def train_in_one_slot(rank: int, *arguments: Any) -> list[Outcome]:
    from megatron.zero_bubble.integration.adapter.graph_slots import GraphSlots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphSlots, "current", 0)
        return train(rank, *arguments)[0]


@pytest.mark.full
def test_one_slot_is_too_few(ranks: RankPool) -> None:
    """A replay overwrites what the microbatch before needs."""
    flags, schedules = Layout(2, num_layers=4).flags(4, NO_BIAS), [None, "zb-h1"]
    with pytest.raises(RankFailure, match="nan"):
        ranks.run(2, train_in_one_slot, flags, schedules, [], True, "2.8.0", timeout=300)
