"""Microbatches of different lengths on the wall clock: stock megatron-core and our schedules, with passes that sleep.

Samples of reinforcement learning are packed into microbatches, the same for all variants. Their passes take the time of
their lengths as in ``lengths`` (F = B = W per token, and attention), and their messages have the bytes of their tokens.
Each variant is a whole forward-backward call on gloo ranks: stock with ``variable_seq_lengths``, which sends the shape
of every tensor before the tensor, or ours with headers or with known shapes.

Microbatches run in one of three orders:

- given: random.
- verl: sorted by their time, the smallest at both ends.
- balance: the order that ``megatron.zero_bubble.balance`` would choose for the schedule.

The samples are drawn several times, and every round runs each draw once under each variant. Gains are those over stock
in verl's order: the median over rounds of ratios within a round, and the ratio of the least times, which other load on
the machine disturbs less.

    bash scripts/bench.sh lengths_wall [--num-ranks 4] [--num-microbatches 12] [--pass-ms 40] [--draws 3] [--rounds 3]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from bench import ranks
from bench.emulated_compute import timed
from bench.lengths import DATA, HIDDEN, fewest, simulator
from megatron.zero_bubble import Kind, LengthCost, Pass, build
from megatron.zero_bubble.core.costs.lengths import Load, PackedCosts
from megatron.zero_bubble.engine.wgrad.store import WgradStore
from megatron.zero_bubble.planning.balance import load_of
from tests.helpers.emulate.clock import sleep_until

DATA_NAME, MOST_TOKENS = "RL", 16384
WIDTH = 8
"""Elements per token of a message: 512 KiB for the largest microbatch."""
STOCK = "stock 1f1b"
IN_VERLS_ORDER = f"{STOCK}, verl's order"
TELLS = ("headers", "shapes")
"""How receivers learn the shapes under our schedules."""


@dataclass(frozen=True)
class Variant:
    """What runs in one turn.

    Attributes:
        schedule: None for stock.
        order: ``given``, ``verl`` or ``balance``.
        tells: one of ``TELLS``; for stock, nothing.
    """

    schedule: str | None
    order: str
    tells: str = ""

    @property
    def name(self) -> str:
        order = {"verl": "verl's order", "given": "given order", "balance": "order of balance"}[self.order]
        return ", ".join(filter(None, (self.schedule or STOCK, order, self.tells)))


VARIANTS = (
    Variant(None, "given"),
    Variant(None, "verl"),
    Variant("1f1b", "verl", "shapes"),
    *(Variant(name, order, tells) for name in ("zb-h1", "zb-v") for order in ("verl", "balance") for tells in TELLS),
)


def main() -> int:
    """Start the ranks, or run as one of them."""
    options = _parse()
    return ranks.on_pipeline("lengths_wall", options.num_ranks, partial(_measure, options), partial(_report, options))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--num-microbatches", type=int, default=12)
    parser.add_argument("--pass-ms", type=float, default=40.0, help="mean time of an F of a whole rank")
    parser.add_argument("--draws", type=int, default=3, help="number of times that the samples are drawn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/lengths_wall.json"))
    return parser.parse_args()


def drawn(number: int, seed: int) -> list[Load]:
    """The loads of ``number`` microbatches, in random order."""
    generator, cost = random.Random(seed), LengthCost.of_hidden_size(HIDDEN)
    lengths: list[int] = []
    while len(packed := fewest(lengths, cost, MOST_TOKENS) if lengths else []) < number:
        lengths += DATA[DATA_NAME].lengths(1, generator)
    generator.shuffle(packed)
    return [load_of(microbatch, lengths) for microbatch in packed]


def ordered(loads: Sequence[Load], order: str, schedule: str, num_ranks: int) -> list[Load]:
    """The loads in one of the orders."""
    simulated = simulator(schedule, num_ranks)
    if order == "balance":
        return [loads[at] for at in simulated.best(loads)[1]]
    if order == "given":
        return list(loads)
    descending = sorted(loads, key=simulated.cost.microbatch, reverse=True)
    return descending[::2][::-1] + descending[1::2]


def in_ms(loads: Sequence[Load], pass_ms: float) -> LengthCost:
    """The cost of microbatches in ms, whose F takes ``pass_ms`` on average, and so its whole rank three times that."""
    cost = LengthCost.of_hidden_size(HIDDEN)
    scale = 3 * pass_ms / mean(map(cost.microbatch, loads))
    return LengthCost(cost.linear * scale, cost.quadratic * scale)


def planned_ms(variant: Variant, loads: Sequence[Load], cost: LengthCost, num_ranks: int) -> float:
    """The simulated time, without messages; the cost of equal units is scaled."""
    simulated = simulator(variant.schedule or "1f1b", num_ranks)
    return simulated.makespan(loads) * cost.linear / simulated.cost.linear


def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    turns, rows = {}, []
    for draw in range(options.draws):
        loads = drawn(options.num_microbatches, draw)
        cost = in_ms(loads, options.pass_ms)
        for variant in VARIANTS:
            own = ordered(loads, variant.order, variant.schedule or "1f1b", options.num_ranks)
            row = {"draw": draw, "variant": variant.name, "tokens": [load.tokens for load in own]}
            rows.append({**row, "planned_ms": planned_ms(variant, own, cost, options.num_ranks)})
            turns[f"{draw} {variant.name}"] = _turn(variant, own, cost, options.num_ranks)
    times = ranks.interleaved(turns, options.rounds, warm_up=0)
    return [{**row, "rounds_ms": times[f"{row['draw']} {row['variant']}"]} for row in rows]


def _turn(variant: Variant, loads: Sequence[Load], cost: LengthCost, num_ranks: int) -> Callable[[], float]:
    """What connects, runs one iteration of a variant and returns its time in ms."""

    def turn() -> float:
        from megatron.core import parallel_state

        import megatron.zero_bubble

        pipeline = None if variant.schedule is None else megatron.zero_bubble.apply(variant.schedule)
        num_chunks = 2 if variant.schedule == "zb-v" else None
        parallel_state.set_virtual_pipeline_model_parallel_world_size(num_chunks)
        try:
            job = _Job(variant, loads, cost, num_ranks, num_chunks, None if pipeline is None else pipeline.store)
            job.iteration()  # plans and connects
            job.sleeps = True
            return timed(job.iteration)()
        finally:
            megatron.zero_bubble.revert()

    return turn


class _Job:
    """The stages of this rank, and a loop over microbatches.

    Args:
        store: that of our schedules; None for stock.

    Attributes:
        sleeps: whether passes take time.
    """

    def __init__(
        self,
        variant: Variant,
        loads: Sequence[Load],
        cost: LengthCost,
        num_ranks: int,
        num_chunks: int | None,
        store: WgradStore | None,
    ) -> None:
        import torch.distributed as dist
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=num_ranks * (num_chunks or 1),
            hidden_size=WIDTH,
            num_attention_heads=1,
            pipeline_model_parallel_size=num_ranks,
            virtual_pipeline_model_parallel_size=num_chunks,
            overlap_p2p_comm=num_chunks is not None,
            batch_p2p_comm=num_chunks is None,
            pipeline_dtype=torch.float32,
            moe_token_dispatcher_type="alltoall",  # Megatron asks for it with the next one
            variable_seq_lengths=True,
        )
        placement = build(variant.schedule or "1f1b", num_ranks=num_ranks, num_microbatches=len(loads)).placement
        costs = cost.passes(placement, tuple(loads))
        self.sleeps = False
        self._loads, self._tells = loads, variant.tells
        stages, last = placement.stages_of(dist.get_rank()), placement.num_stages - 1
        self._chunks = [_Stage(config, costs, store, self, stage == 0, stage == last) for stage in stages]

    def iteration(self) -> None:
        """One call of the forward-backward function."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        import megatron.zero_bubble

        numbers = range(len(self._loads))
        iterators: Any = [iter(numbers) for _ in self._chunks]
        known = megatron.zero_bubble.shapes([load.tokens for load in self._loads])
        with known if self._tells == "shapes" else nullcontext():
            get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iterators if len(self._chunks) > 1 else iterators[0],
                model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
                num_microbatches=len(self._loads),
                seq_length=1,
                micro_batch_size=1,
            )

    def _forward_step(self, numbers: Iterator[int], stage: _Stage) -> tuple[torch.Tensor, Callable[..., Any]]:
        return stage(next(numbers)), lambda output: (output.sum(), {})


class _Stage(torch.nn.Module):
    """A stage whose passes only take time, with the interface that megatron-core requires."""

    def __init__(
        self,
        config: Any,
        costs: PackedCosts,
        store: WgradStore | None,
        job: _Job,
        is_first: bool,
        is_last: bool,
    ) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.pre_process, self.post_process = is_first, is_last
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.store, self._costs, self._job = store, costs, job
        self._input: torch.Tensor | None = None

    def set_input_tensor(self, tensors: Any) -> None:
        self._input = tensors[0] if isinstance(tensors, list) else tensors

    def seconds(self, kind: Kind, microbatch: int) -> float:
        """The time of a pass; all stages are equal."""
        return self._costs.duration(Pass(0, kind, microbatch)) / 1e3 if self._job.sleeps else 0.0

    def forward(self, microbatch: int) -> torch.Tensor:
        x = self._input
        if x is None:
            x = torch.zeros(self._costs.loads[microbatch].tokens, 1, WIDTH)
        return _Sleep.apply(x, self.weight, self, microbatch)


class _Sleep(torch.autograd.Function):
    """A copy whose passes take the time of a stage; what it computes is within that time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _weight: torch.Tensor, stage: _Stage, microbatch: int) -> torch.Tensor:
        begun = time.perf_counter()
        ctx.stage, ctx.microbatch = stage, microbatch
        y = x.clone()
        sleep_until(begun + stage.seconds(Kind.F, microbatch))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        begun = time.perf_counter()
        stage, microbatch = ctx.stage, ctx.microbatch
        seconds, wgrad = stage.seconds(Kind.B, microbatch), _Wgrad(stage, microbatch)
        if stage.store is not None and stage.store.deferring:
            stage.store.put(wgrad)
        else:
            seconds += wgrad.seconds
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        sleep_until(begun + seconds)
        return grad, None, None, None


class _Wgrad:
    """A deferred weight gradient, which only takes time; see ``wgrad.store.Deferred``."""

    num_elements, gathers = 1, False

    def __init__(self, stage: _Stage, microbatch: int) -> None:
        self.weight, self.seconds = stage.weight, stage.seconds(Kind.W, microbatch)

    def prefetch(self) -> None:
        """It needs no communication."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """It keeps none."""
        return ()

    def run(self) -> tuple[()]:
        """Take the time of W."""
        sleep_until(time.perf_counter() + self.seconds)
        return ()


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The means over draws per variant: times, measured over planned, and the gain over stock in verl's order."""
    stock = {row["draw"]: row for row in rows if row["variant"] == IN_VERLS_ORDER}
    found = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == name]
        pairs = [(stock[row["draw"]]["rounds_ms"], row["rounds_ms"]) for row in own]
        gains = [median(a / b for a, b in zip(*pair, strict=True)) for pair in pairs]
        found.append(
            {
                "variant": name,
                "planned_ms": mean(row["planned_ms"] for row in own),
                "measured_ms": mean(median(row["rounds_ms"]) for row in own),
                "measured_over_planned": mean(median(row["rounds_ms"]) / row["planned_ms"] for row in own),
                "planned_gain": mean(stock[row["draw"]]["planned_ms"] / row["planned_ms"] for row in own),
                "measured_gain": mean(gains),
                "least_gain": mean(min(before) / min(after) for before, after in pairs),
                "gains": gains,
            }
        )
    return found


def _report(options: argparse.Namespace, rows: list[dict[str, Any]], load: tuple[float, float]) -> None:
    settings = {
        name: getattr(options, name) for name in ("num_ranks", "num_microbatches", "pass_ms", "draws", "rounds")
    }
    of_variants = summary(rows)
    content = {"bench": "lengths_wall", "machine": ranks.machine(), **settings, "load_average": load}
    ranks.write(options.output, {**content, "variants": of_variants, "rows": rows})
    print(f"load average {load[0]:.1f} before, {load[1]:.1f} after; gain: over {IN_VERLS_ORDER}")
    print(
        f"{'':34}{'planned ms':>12}{'measured ms':>12}{'ratio':>8}{'gain':>8}{'measured':>10}{'by least':>10}  by draw"
    )
    for each in of_variants:
        figures = "".join(
            format(each[key], unit)
            for key, unit in (
                *(("planned_ms", "12.0f"), ("measured_ms", "12.0f"), ("measured_over_planned", "8.3f")),
                *(("planned_gain", "8.3f"), ("measured_gain", "10.3f"), ("least_gain", "10.3f")),
            )
        )
        print(f"{each['variant']:34}{figures}  {', '.join(f'{gain:.3f}' for gain in each['gains'])}")


if __name__ == "__main__":
    sys.exit(main())
