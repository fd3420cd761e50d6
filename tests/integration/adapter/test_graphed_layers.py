"""Train with CUDA graphs of a fake TransformerEngine: equal bit for bit to eager layers under stock 1F1B.

The helper that captures is megatron-core's own. After the first iteration, layers replay graphs of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.core.plan import plan_of, slots
from megatron.zero_bubble.core.schedules import build
from tests.helpers import engine
from tests.helpers.engine_layers import Linear, Wrapper, with_engine
from tests.helpers.graphed_engine import graphs_on_cpu
from tests.helpers.layer_graphs import KIND
from tests.helpers.megatron_lm import Checkout, checkouts
from tests.helpers.parity import (
    Layout,
    Outcome,
    _splits,
    _train_once,
    _under_each,
    assert_same_bits,
    assert_same_model,
)
from tests.helpers.ranks import RankFailure, RankPool
from tests.helpers.rows import some
from tests.integration.adapter.test_auto import waiting_for_plans
from tests.loops.checkouts import check_on

TWO = Layout(2, num_layers=4)
NO_BIAS = "--disable-bias-linear --untie-embeddings-and-output-weights --bf16"


@contextmanager
def graphed(row: Row) -> Iterator[list[Any]]:
    """Layers of the fake engine in this context; yields the helpers that have captured."""
    from megatron.core import parallel_state
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
            setattr(config, name, [kind[scope] for scope in row.scopes])
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
                if trainer.args.overlap_param_gather:
                    helper.cuda_graph_set_manual_hooks()
                helpers.append(helper)
                trainer.captured = True
            seen.add(id(chunks))
        reports = passes(trainer, batches, share, forward_only)
        spikes = trainer.state.iteration + 1 == row.spike and parallel_state.get_pipeline_model_parallel_rank() == 1
        if spikes and not forward_only:
            for buffer in (buffer for chunk in chunks for buffer in chunk.buffers):
                buffer.grad_data.mul_(1e6)
        return reports

    with engine.installed(row.release), graphs_on_cpu(lambda: count[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wrapper, "fused", True)
        patch.setattr(Wrapper, "fp8_layers", False)
        patch.setattr(model, "_layer_spec", lambda *args: with_engine(spec(*args)))
        patch.setattr(model, "build_config", with_graphs)
        patch.setattr(loop.Trainer, "_passes", capture_first)
        yield helpers


def train(rank: int, name: str, edit: Callable[[Any], object] = lambda _: None) -> tuple[list[Outcome], list[int], int]:
    """Train without and with graphs; return the outcomes, the slots of each stage, and the replays of W.

    Args:
        name: of a row.
        edit: changes more of what is replaced meanwhile.
    """
    from megatron.zero_bubble.engine.wgrad.graphed import ReplayedGradients

    row, start, outcomes, numbers, run, ran = ROWS[name], None, [], [], ReplayedGradients.run, []
    with pytest.MonkeyPatch.context() as patch, graphed(row) as helpers, waiting_for_plans():
        patch.setattr(ReplayedGradients, "run", lambda self: (ran.append(self), run(self))[1])
        row.edit(patch)
        edit(patch)
        for args, pipeline in _under_each(row.flags, [None, row.schedule]):
            outcome, start = _train_once(args, _splits(args), start, pipeline)
            outcomes.append(outcome)
        for helper in helpers:
            numbers += [layers[0].cuda_graphs[0]._stage.num_slots for layers in helper.callables_per_chunk if layers]
    return outcomes, numbers, len(ran)


def gathering_in_the_step(patch: Any) -> None:
    """Gather the weights of the first chunk as soon as their part of the optimizer has stepped."""
    from pretrain import model

    build_optimizer = model.build_optimizer

    def build_in_parts(args: Any, chunks: Any) -> Any:
        args.overlap_param_gather_with_optimizer_step = len(chunks) > 1
        return build_optimizer(args, chunks)

    patch.setattr(model, "build_optimizer", build_in_parts)


def with_latent_experts(patch: Any) -> None:
    """Give experts fewer features, with a projection before and one after them."""
    from megatron.core.transformer.moe import moe_layer

    from pretrain import model

    build_config = model.build_config

    def build(*args: Any) -> Any:
        config = build_config(*args)
        config.moe_latent_size = 8
        return config

    patch.setattr(model, "build_config", build)
    patch.setattr(moe_layer, "HAVE_TE", True)
    patch.setattr(moe_layer, "TELinear", Linear, raising=False)


@dataclass(frozen=True)
class Row:
    """A job.

    Attributes:
        scopes: the parts of layers that are captured; none for whole layers.
        release: of TransformerEngine.
        has_w: whether W is a graph of its own.
        spike: the iteration whose gradients are too large on the second rank.
        edit: changes what is replaced meanwhile.
    """

    schedule: str
    release: str = "2.13.0"
    scopes: Sequence[str] = ()
    options: str = NO_BIAS
    layout: Layout = TWO
    has_w: bool = True
    num_microbatches: int = 4
    steps: int = 3
    spike: int = 0
    edit: Callable[[Any], object] = lambda _: None

    @property
    def flags(self) -> str:
        return self.layout.flags(self.num_microbatches, f"{self.options} --train-iters {self.steps}")


AHEAD = "--zero-bubble-post-validation"
CLIPPED = f"{NO_BIAS} --clip-grad 100"
EXPERTS = f"--num-experts 4 --moe-aux-loss-coeff 0.01 {NO_BIAS} --overlap-grad-reduce --no-align-grad-reduce"
PARTS = ["attn", "moe_router"]
BEFORE_DISPATCH = [*PARTS, "moe_preprocess"]
REPLICAS = Layout(2, data=2)
FOUR = Layout(2, data=2, num_layers=4)
GATHERED = f"{NO_BIAS} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
INSIDE = {"release": "2.8.0", "has_w": False}
ROWS = {
    "W inside": Row("zb-h1", **INSIDE),
    "W apart": Row("zb-h1"),
    "biases, W inside": Row("zb-h2", options="--bf16", has_w=False),
    "V, W apart": Row("zb-v"),
    "V, W inside": Row("zb-v", **INSIDE),
    "several stages, W apart": Row("zb-interleaved"),
    "several stages, W inside": Row("zb-interleaved", **INSIDE),
    "several stages, attention": Row("zb-interleaved", scopes=["attn"]),
    "experts, W apart": Row("zb-h1", scopes=PARTS, options=EXPERTS, layout=REPLICAS),
    "experts, W inside": Row("zb-h1", scopes=PARTS, options=EXPERTS, layout=REPLICAS, **INSIDE),
    "experts on a V, W apart": Row("zb-v", scopes=PARTS, options=EXPERTS, layout=FOUR),
    "experts on a V, W inside": Row("zb-v", scopes=PARTS, options=EXPERTS, layout=FOUR, **INSIDE),
    "experts, several stages, W apart": Row("zb-interleaved", scopes=PARTS, options=EXPERTS, layout=FOUR),
    "experts, several stages, W inside": Row("zb-interleaved", scopes=PARTS, options=EXPERTS, layout=FOUR, **INSIDE),
    "latent experts, W apart": Row("zb-h1", scopes=BEFORE_DISPATCH, options=EXPERTS, edit=with_latent_experts, steps=3),
    "latent experts, W inside": Row(
        "zb-h1", scopes=BEFORE_DISPATCH, options=EXPERTS, edit=with_latent_experts, **INSIDE
    ),
    "gathered in the step": Row("zb-interleaved", options=GATHERED, layout=FOUR, edit=gathering_in_the_step, steps=2),
    "validated": Row(f"zb-h2 {AHEAD}", options=CLIPPED, steps=3, spike=2),
    "validated, W inside": Row(f"zb-h1 {AHEAD}", options=CLIPPED, steps=3, spike=2, **INSIDE),
    "planned": Row("zb-auto --zero-bubble-memory-limit 2p", num_microbatches=5, steps=9),
    "growing batches": Row("zb-h2", options=f"{NO_BIAS} --rampup-batch-size 4 2 14", steps=4),
}
DEFAULT = ("W inside", "V, W apart", "experts, W apart", "several stages, attention", "validated", "planned")
DEFAULT += ("gathered in the step",)


def num_slots(row: Row) -> list[list[int]]:
    """What the stages of each rank need."""
    plan = plan_of(build(row.schedule.split()[0], num_ranks=2, num_microbatches=row.num_microbatches))
    of_ranks = [[max(of) + 1 for _, of in sorted(slots(plan, rank).items())] for rank in range(2)]
    return [of for of in of_ranks for _ in range(row.layout.data)]


@pytest.mark.parametrize("name", some(ROWS, *DEFAULT))
def test_same_bits(ranks: RankPool, name: str) -> None:
    results = same_bits(ranks, name)
    row = ROWS[name]
    found = [numbers for _, numbers, _ in results]
    if "zb-auto" in row.schedule:
        assert max(map(max, found)) > 2, "the plan has more microbatches in flight than the schedule before it"
    else:
        assert found == num_slots(row)
    assert all((num_ran > 0) == row.has_w for _, _, num_ran in results)
    if row.spike:
        assert [own[1].counts["repeated"] for own, _, _ in results] == [1, 0]


def same_bits(ranks: RankPool, name: str, *edit: Callable[[Any], object]) -> list[tuple[list[Outcome], list[int], int]]:
    """Compare a row with stock; returns what ``train`` does on every rank."""
    row = ROWS[name]
    results: list[Any] = ranks.run(row.layout.num_ranks, train, name, *edit, timeout=300)
    outcomes, schedules = [own for own, _, _ in results], [None, row.schedule]
    if "zb-v" in row.schedule or "zb-interleaved" in row.schedule:
        assert_same_model(outcomes, schedules, row.layout, row.steps)
    else:
        assert_same_bits(outcomes, schedules, row.steps)
    return results


SPOILED = "nan|index -1 is out of bounds"
"""What is read of memory that a replay has spoilt, as numbers or as the experts of tokens."""


def in_one_slot(patch: Any) -> None:
    from megatron.zero_bubble.integration.adapter.graph_slots import GraphSlots

    patch.setattr(GraphSlots, "current", 0)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in ROWS if "W " in name])
def test_one_slot_is_too_few(ranks: RankPool, name: str) -> None:
    """A replay overwrites what the microbatch before needs."""
    with pytest.raises((RankFailure, AssertionError), match=SPOILED):
        same_bits(ranks, name, in_one_slot)


def in_the_order_of_stock(patch: Any) -> None:
    """Capture with one call, whose graphs share memory in the order of 1F1B."""
    from megatron.zero_bubble.integration.patching import transformer_engine

    patch.setattr(transformer_engine, "graphing", lambda original, *_: original)


@pytest.mark.full
@pytest.mark.parametrize("name", ["V, W inside", "experts on a V, W inside"])
def test_the_order_of_stock_is_wrong(ranks: RankPool, name: str) -> None:
    with pytest.raises((RankFailure, AssertionError), match=SPOILED):
        same_bits(ranks, name, in_the_order_of_stock)


OF_VERSIONS = {
    "W inside": (KIND, {"schedule": "zb-h1", "release": "2.8.0", "with_stock": True}),
    "W apart": (KIND, {"schedule": "zb-v", "release": "2.13.0", "with_stock": False}),
}


@pytest.mark.full
@pytest.mark.parametrize("checkout", checkouts(), ids=str)
def test_same_bits_on_other_versions(checkout: Checkout, tmp_path: Path) -> None:
    """In 0.13, data parallelism has no hooks that wait for W, so that all of it is inside."""
    names = list(OF_VERSIONS)[: 1 if checkout.minor == "0.13" else None]
    check_on(checkout, {name: OF_VERSIONS[name] for name in names}, tmp_path)
