"""Experts on the wall clock: stock's combined schedule and our schedules, with all-to-alls and computation that sleep.

The times are those of the table of ``experts``. Each rank has two lanes, as a GPU has two streams: a thread that
computes and a thread that communicates, and a part of a pass sleeps on its lane when the part before it has ended. The
model of this bench gives megatron-core such a plan of its layers, so that megatron-core's own schedule and our runtime
with its handler of pairs run the same code; passes without a plan run their parts one after the other.

A call of megatron-core ends when both lanes have ended, because a tensor on a CPU must be there when it is returned. A
plan may let the next pass compute while the last all-to-all of a forward is under way: that is lost here.

    bash scripts/bench.sh experts_wall [--num-ranks 4] [--num-microbatches 16] [--column 0] [--layers 4] [--rounds 5]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import ranks
from bench.emulated_compute import timed
from bench.expert_stages import TOKENS, WIDTH, Lanes, Stage
from bench.experts import SCALES, costs_file, shares
from megatron.zero_bubble import PassCosts, Schedule, build, simulate
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.schedules.alone import fuse_alone, split_alone
from megatron.zero_bubble.engine.wgrad.store import WgradStore

STOCK = "stock combined"


@dataclass(frozen=True)
class Variant:
    """What runs in one turn.

    Attributes:
        schedule: its name.
        stock: whether megatron-core's own schedule runs in this order.
        pairs: whether a forward runs together with a backward.
    """

    name: str
    schedule: str
    stock: bool = False
    pairs: bool = True

    def planned(self, costs: Callable[[Any], PassCosts], num_ranks: int, num_microbatches: int) -> Schedule:
        """The shortest schedule with this name: a backward that runs alone is fused or split."""
        chunks = 2 if self.schedule.startswith("interleaved") else None
        sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
        schedule = build(self.schedule, **sizes, num_chunks=chunks, pairs=self.pairs)
        if self.stock or not self.pairs:
            return schedule
        choices = [change(schedule) for change in (fuse_alone, split_alone)]
        return min(choices, key=lambda choice: simulate(choice, costs(choice.placement)).makespan_ms)


VARIANTS = (
    Variant(STOCK, "interleaved-1f1b", stock=True),
    Variant("interleaved-1f1b with pairs", "interleaved-1f1b"),
    Variant("dualpipe-v with pairs", "dualpipe-v"),
    Variant("zb-v, no overlap", "zb-v", pairs=False),
)


def main() -> int:
    """Start the ranks, or run as one of them."""
    options = _parse()
    return ranks.on_pipeline("experts_wall", options.num_ranks, partial(_measure, options), partial(_report, options))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--num-microbatches", type=int, default=16)
    parser.add_argument("--column", type=int, default=0, choices=range(len(SCALES)), help="column of bench experts")
    parser.add_argument("--layers", type=int, default=4, help="layers per rank, an even number: more take longer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/experts_wall.json"))
    return parser.parse_args()


def costs_on(column: int, layers: int, placement: Any) -> PassCosts:
    """The costs of a column of bench ``experts``, with messages that take no time."""
    costs, _ = costs_file(SCALES[column], layers).on(placement)
    return replace(costs, comm_ms=0.0)


def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    turns, lanes = {}, {}
    rows: list[dict[str, Any]] = []
    costs = partial(costs_on, options.column, options.layers)
    for variant in VARIANTS:
        schedule = variant.planned(costs, options.num_ranks, options.num_microbatches)
        timeline = simulate(schedule, costs(schedule.placement))
        file = Path(tempfile.mkdtemp()) / "plan.json"
        file.write_text(plan_to_json(timeline), encoding="utf-8")
        own = lanes[variant.name] = Lanes()
        turns[variant.name] = _turn(variant, schedule, costs(schedule.placement), str(file), own)
        rows.append(
            {"variant": variant.name, "planned_ms": timeline.makespan_ms, "peak": max(timeline.peak_activation)}
        )
    times = ranks.interleaved(turns, options.rounds, warm_up=0)
    for own in lanes.values():
        own.close()
    return [{**row, "rounds_ms": times[row["variant"]], "ops_ms": lanes[row["variant"]].medians()} for row in rows]


def _turn(variant: Variant, schedule: Schedule, costs: PassCosts, file: str, lanes: Lanes) -> Callable[[], float]:
    """What connects, runs one iteration of a variant and returns its time in ms."""

    def turn() -> float:
        from megatron.core import parallel_state

        import megatron.zero_bubble

        config = megatron.zero_bubble.ZeroBubbleConfig(schedule_file=file)
        pipeline = None if variant.stock else megatron.zero_bubble.apply(config)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
        try:
            # A schedule with pairs has none of few microbatches, and then megatron-core's overlap is refused.
            pairs = variant.stock or schedule.overlaps
            run = _iteration(pairs, schedule, costs, lanes, None if pipeline is None else pipeline.store)
            run()  # connects
            lanes.sleeps = True
            return timed(run)()
        finally:
            lanes.sleeps = False
            megatron.zero_bubble.revert()

    return turn


def _iteration(
    pairs: bool, schedule: Schedule, costs: PassCosts, lanes: Lanes, store: WgradStore | None
) -> Callable[[], None]:
    """A function that runs one iteration on this rank."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=schedule.num_stages,
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=schedule.num_ranks,
        virtual_pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=schedule.num_ranks,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        pipeline_dtype=torch.float32,
    )
    if pairs:  # what megatron-core requires of a model with experts; set here, because these stages have none
        config.overlap_moe_expert_parallel_comm, config.expert_model_parallel_size = True, 2
        config.moe_token_dispatcher_type, config.bf16 = "alltoall", True
    own = schedule.placement.stages_of(dist.get_rank())
    chunks = [Stage(config, costs, stage, schedule.num_stages, lanes, store) for stage in own]

    def forward_step(_batches: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Callable[..., Any]]:
        return (model.build_schedule_plan() if return_schedule_plan else model()), lambda output: (output.sum(), {})

    def run() -> None:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[None, None],
            model=chunks,
            num_microbatches=schedule.num_microbatches,
            seq_length=TOKENS,
            micro_batch_size=1,
        )

    return run


def _report(options: argparse.Namespace, rows: list[dict[str, Any]], load: tuple[float, float]) -> None:
    settings = {
        name: getattr(options, name) for name in ("num_ranks", "num_microbatches", "column", "layers", "rounds")
    }
    rows = summary(rows)
    content = {"bench": "experts_wall", "machine": ranks.machine(), **settings, "exposed": shares()[options.column]}
    ranks.write(options.output, {**content, "load_average": load, "variants": rows})
    print(f"{content['exposed']:.0%} exposed; load average {load[0]:.1f} before, {load[1]:.1f} after")
    print(
        f"{'':30}{'planned ms':>12}{'measured ms':>13}{'ratio':>8}{'of stock':>10}{'planned':>9}{'pair':>7}{'peak':>7}"
    )
    for row in rows:
        pair = "" if row["pair"] is None else f"{row['pair']:.2f}"
        print(
            f"{row['variant']:30}{row['planned_ms']:12.0f}{row['measured_ms']:13.0f}{row['over_planned']:8.3f}"
            f"{row['of_stock']:10.3f}{row['planned_of_stock']:9.3f}{pair:>7}{row['peak']:7.1f}"
        )


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The medians over rounds, and the ratios to the plan and, within a round, to stock.

    ``pair`` is the time of a pair, divided by that of its passes alone; None without pairs.
    """
    stock = next(row for row in rows if row["variant"] == STOCK)
    found = []
    for row in rows:
        measured, ops = median(row["rounds_ms"]), row["ops_ms"]
        of_stock = [own / other for own, other in zip(row["rounds_ms"], stock["rounds_ms"], strict=True)]
        pairs = [ops[both] / sum(ops[one] for one in both.split()) for both in ("F BW", "F B") if _knows(ops, both)]
        found.append(
            {
                **row,
                "measured_ms": measured,
                "over_planned": measured / row["planned_ms"],
                "of_stock": median(of_stock),
                "planned_of_stock": row["planned_ms"] / stock["planned_ms"],
                "pair": min(pairs, default=None),
            }
        )
    return found


def _knows(ops: Mapping[str, float], both: str) -> bool:
    """Whether a pair of these kinds ran, and its passes alone."""
    return both in ops and all(one in ops for one in both.split())


if __name__ == "__main__":
    sys.exit(main())
