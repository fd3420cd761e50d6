"""Real compute: the gain of zero-bubble schedules on a real GPT, on single-threaded CPU ranks or on GPUs.

With one rank (--num-ranks 1) there is no bubble: the bench then shows pass times and the cost of the split.

Every round runs one iteration (all forward and backward passes, without the optimizer) of stock megatron-core and of
each schedule. A ratio is the median over rounds of ratios within a round, so it compares iterations that ran close in
time. Next to the measured ratio is the ratio that the simulator predicts from the median passes and transfers of the
same turn, and the lower bound of that prediction for any order of these passes on the same ranks
(megatron.zero_bubble.core.analysis.bounds).

The cost of the split is the difference between 1F1B and "1f1b, split", which runs every W directly after its B in the
order of 1F1B. The gain of fused weight gradients is the difference to the "exact" variants, which compute weight
gradients as megatron-core does. Memory is the peak of an iteration, on the rank where it is largest; without a GPU,
that of the process so far. The published zb-v assumes that all passes take equal time; "zb-v fitted" is zb-v as
``zero-bubble plan --objective makespan`` fits it, in the same memory, to the passes that it ran in a few trial rounds.
(Fitting to consecutive iterations would fit it to the machine's state at that moment.) A variant with vocabulary
parallelism is compared with stock, whose last rank has the whole output layer; choose the size of the vocabulary.
"Offloaded" variants move all activations to host memory between F and B; their prediction includes the measured copies.

    bash scripts/bench.sh real_compute [--device cpu] [--rounds 15] [--hidden-size 512]
        [--num-layers 8] [--num-microbatches 4 8 16] [--num-ranks 2] [--only NAME ...]
        [--dtype bfloat16] [--seq-length 4096] [--vocab-size 8192] [--flags="--recompute-activations"]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench import page, ranks
from megatron.zero_bubble import Kind, Pass, PassCosts, PassMemory, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.core.ir.vocabulary import FLOWS, Divided
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.plan.offload import offload, select_longest
from megatron.zero_bubble.core.search import fit
from megatron.zero_bubble.planning.setup import Named, Setup
from megatron.zero_bubble.planning.source import ScheduleSource

STOCK = "stock 1f1b"
STOCK_INTERLEAVED = "stock interleaved"
SPLIT = "1f1b, split"
EXACT = ", exact"
FITTED = " fitted"
OURS = ("1f1b", SPLIT, SPLIT + EXACT, "zb-h1", "zb-h2", "zb-v", "zb-v" + EXACT, "zb-v" + FITTED)
SLICED = {f"seq-zb-h1, {number} slices": number for number in (2, 4)}
DIVIDED = {f"{name}, vocabulary {algorithm}": (name, algorithm) for name in ("1f1b", "zb-h1") for algorithm in FLOWS}
"""Schedule and algorithm of vocabulary parallelism by variant; all run on one model."""
MOVED = ", offloaded"
OFFLOADED = tuple(name + MOVED for name in ("zb-h2", "zb-v"))
_STOCK = (STOCK, STOCK_INTERLEAVED)
_TRIAL_ROUNDS = 8
_SETTINGS = ("hidden_size", "vocab_size", "seq_length", "dtype", "flags", "num_layers", "num_ranks", "rounds")
_FLAGS = {
    STOCK: "",
    STOCK_INTERLEAVED: "--num-virtual-stages-per-pipeline-rank 2",
    "zb-v": "--zero-bubble-schedule zb-v",
    next(iter(DIVIDED)): "--zero-bubble-schedule 1f1b --zero-bubble-vocabulary-parallel 1",
}
"""Flags of each model, by the first variant that runs on it; all other variants run on the model of stock 1F1B."""


def main() -> int:
    """Start the ranks, or run as one of them."""
    options = _parse()
    if not ranks.on_ranks():
        ranks.launch("real_compute", options.num_ranks, sys.argv[1:])
        return 0
    results = [_measure(options, num_microbatches) for num_microbatches in options.num_microbatches]

    if ranks.is_first():
        section = "passes" if options.num_ranks == 1 else "real-compute"
        page.report(section, {"device": options.device, "results": results}, options.output)
    ranks.leave()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--seq-length", type=int, default=256, help="tokens per microbatch")
    parser.add_argument("--vocab-size", type=int, default=256, help="rows of the embedding and of the output layer")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--flags", default="", help="more flags of the model, as pretrain_gpt.py takes them")
    parser.add_argument(
        "--num-layers", type=int, default=8, help="number of layers on all ranks together, a multiple of four"
    )
    parser.add_argument("--num-microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="variants to run in addition to stock 1f1b; default: all without slices, vocabulary parallelism and "
        "offloading",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/bench/real_compute.json"))
    parser.add_argument("--num-ranks", type=int, choices=(1, 2), default=2)
    options = parser.parse_args()
    usual = (*_STOCK, *OURS) if options.num_ranks > 1 else (STOCK, SPLIT, SPLIT + EXACT)
    known = (*usual, *SLICED, *DIVIDED, *OFFLOADED) if options.num_ranks > 1 else usual
    if unknown := sorted({*options.only} - {*known}):
        parser.error(
            f"--only takes names of {', '.join(known)} with --num-ranks {options.num_ranks}; got {', '.join(unknown)}; "
            "quote each name"
        )
    options.only = options.only or usual
    return options


class Job:
    """A GPT on all ranks, with one sequence per microbatch; ``flags`` select the placement of its stages."""

    def __init__(self, options: argparse.Namespace, num_microbatches: int, flags: str = "") -> None:
        import torch

        from megatron.zero_bubble.engine.platforms import select
        from megatron.zero_bubble.planning.job.arguments.checks import check
        from megatron.zero_bubble.planning.job.arguments.parser import parse
        from pretrain.process import Launch
        from pretrain.quiet import quiet

        torch.set_num_threads(1)
        self.launch = Launch.from_environment()
        num_heads = max(8, options.hidden_size // 128)
        precision = "--bf16" if options.dtype == "bfloat16" else ""
        self.args = parse(
            f"--num-layers {options.num_layers} --hidden-size {options.hidden_size} --num-attention-heads "
            f"{num_heads} --seq-length {options.seq_length} --max-position-embeddings {options.seq_length} {precision} "
            "--micro-batch-size 1 --mock-data "
            f"--tokenizer-type NullTokenizer --vocab-size {options.vocab_size - 1} --attention-dropout 0 "
            "--hidden-dropout 0 --lr 1e-4 --train-iters 1 --untie-embeddings-and-output-weights "
            f"--transformer-impl local --pipeline-model-parallel-size {options.num_ranks} "
            f"--zero-bubble-device {options.device} --global-batch-size {num_microbatches} {flags} "
            f"{options.flags}".split()
        )
        check(self.args, options.num_ranks)
        self.platform = select(options.device)
        self.device = self.platform.setup(self.launch.local_rank)
        with quiet():
            self._build()
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, options.vocab_size, (1, options.seq_length + 1), generator=generator).to(
            self.device
        )

    def _build(self) -> None:
        import torch.distributed as dist

        from megatron.zero_bubble.integration.patching import apply, revert
        from pretrain import distributed, model

        if dist.is_initialized():
            distributed.seed(self.args)
        else:
            distributed.initialize(self.args, self.launch, self.platform.backend)
        self.take_turn()
        config = model.build_config(self.args, self.device)
        if self.args.run.has_schedule:
            apply(self.args.zero_bubble)
        self.chunks = model.build_model(self.args, config, self.args.vocab_size + 1, self.device)
        revert()
        model.connect(self.args, self.chunks, model.build_optimizer(self.args, self.chunks))

    def take_turn(self) -> None:
        """Set Megatron's number of chunks per rank, which its initialization sets only once, to that of this model."""
        from megatron.core import parallel_state

        parallel_state.set_virtual_pipeline_model_parallel_world_size(self.args.virtual_pipeline_model_parallel_size)

    def zero_grad(self) -> None:
        """Zero the gradients; called before every iteration and not timed."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def iteration(self) -> None:
        """Run all passes of one global batch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

        # Megatron runs a single rank without its pipeline, but the pipeline supports one rank, and variants replace it.
        alone = self.args.pipeline_model_parallel_size == 1
        run = schedules.forward_backward_pipelining_without_interleaving if alone else get_forward_backward_func()
        run(
            forward_step_func=self._forward_step,
            data_iterator=[None] * len(self.chunks),
            model=self.chunks,
            num_microbatches=self.args.global_batch_size // self.args.data_parallel_size,
            seq_length=self.args.seq_length,
            micro_batch_size=1,
        )

    def _forward_step(self, _batches: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        import torch

        position_ids = torch.arange(self.args.seq_length, device=self.device).unsqueeze(0)
        output = model(self.tokens[:, :-1], position_ids, None, labels=self.tokens[:, 1:].contiguous())
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def _schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule of a variant, before it is fitted to costs."""
    name = _base(name)
    if name in SLICED:
        size = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
        return build("seq-zb-h1", **size, num_slices=SLICED[name])
    if name in DIVIDED:
        divided, algorithm = DIVIDED[name]
        setup = Setup(Named(divided), vocabulary=Divided(algorithm))
        return ScheduleSource.of(setup, num_ranks).make(num_microbatches)
    if name not in (*_STOCK, SPLIT):
        return build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    plain = build("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    if name == STOCK:
        return plain
    if name == STOCK_INTERLEAVED:
        return build("interleaved-1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    return replace(plain, name=name, order=tuple(tuple(q for p in row for q in _halves(p)) for row in plain.order))


def _halves(p: Pass) -> tuple[Pass, ...]:
    return (p._replace(kind=Kind.B), p._replace(kind=Kind.W)) if p.kind is Kind.BW else (p,)


def _base(name: str) -> str:
    """The name of a variant without its suffixes."""
    return name.removesuffix(EXACT).removesuffix(FITTED).removesuffix(MOVED)


def _model(name: str) -> str:
    """The variant that names the model of a variant in ``_FLAGS``, if it has a model of its own."""
    return next(iter(DIVIDED)) if name in DIVIDED else _base(name)


def _is_recorded(name: str) -> bool:
    """Whether the passes are recorded; the order of Megatron's interleaved ones cannot be."""
    return name != STOCK_INTERLEAVED


class _Variant:
    """One way to run the iteration, with the passes it recorded."""

    def __init__(self, job: Job, schedule: Schedule, folder: Path) -> None:
        from megatron.core import parallel_state

        from megatron.zero_bubble.engine.measure.recorder import Recorder

        self._job = job
        self._schedule = schedule
        self._file = folder / f"{schedule.name}.json"
        self._write()
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._recorder = Recorder(job.platform)
        self._timelines: list[Timeline] = []
        self.costs: list[PassCosts] = []
        self.fitted_to: PassCosts | None = None
        self.allocated_bytes = self.reserved_bytes = 0

    def _write(self) -> None:
        """Write the schedule to the file from which this rank reads it."""
        self._file.write_text(plan_to_json(simulate(self._schedule, even_costs(self._schedule.placement))))

    def fit(self) -> None:
        """Fit the schedule to the passes of all turns so far; all ranks compute the same schedule."""
        from megatron.zero_bubble.engine.measure.gather import median_costs

        self.fitted_to = median_costs(self._timelines)
        memory = PassMemory.uniform(self._schedule.placement, 1.0)
        self._schedule = fit(self._schedule, self.fitted_to, memory, objective="makespan")
        self._write()

    def __call__(self) -> float:
        """Milliseconds of one iteration, from the common start of the ranks to the end of the last rank."""
        from megatron.zero_bubble.engine.measure.gather import gather_trace, median_costs
        from megatron.zero_bubble.integration.patching import apply, observe, revert
        from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

        self._job.take_turn()
        if self._schedule.name == STOCK:
            observe([self._recorder])
        elif self._schedule.name != STOCK_INTERLEAVED:
            name = self._schedule.name
            moves: Any = "all" if name.endswith(MOVED) else None
            config = ZeroBubbleConfig(schedule_file=str(self._file), exact=name.endswith(EXACT), offload=moves)
            apply(config, [self._recorder] if _is_recorded(name) else [])
        try:
            self._job.platform.reset_peak_memory()  # here, so that the timed iteration finds its memory reserved
            self._job.iteration()  # plans, connects, and warms caches up again after the other variants
            elapsed, marks = self._timed()
        finally:
            revert()
        if _is_recorded(self._schedule.name):
            timeline = gather_trace(self._schedule.name, marks, self._group).timeline
            if timeline.schedule.order != self._schedule.order:
                raise RuntimeError(f"{self._schedule.name} ran in another order than planned; its figures are invalid")
            self.costs.append(median_costs([timeline]))
            self._timelines.append(timeline)
        return elapsed

    def _timed(self) -> tuple[float, Any]:
        """One iteration's time, and the marks of its passes."""
        import torch.distributed as dist

        platform = self._job.platform
        self._job.zero_grad()
        self._recorder.start(self._group)
        started = time.perf_counter()
        self._job.iteration()
        platform.synchronize()
        dist.barrier(group=self._group)
        elapsed = (time.perf_counter() - started) * 1e3
        peaks: list[Any] = [None] * self._group.size()
        dist.all_gather_object(peaks, (platform.peak_memory_bytes(), platform.peak_reserved_bytes()), group=self._group)
        self.allocated_bytes, self.reserved_bytes = (max(of_ranks) for of_ranks in zip(*peaks, strict=True))
        return elapsed, self._recorder.stop()

    def planned(self) -> list[float]:
        """Simulated time of each turn's iteration, from its measured passes and without any overhead."""
        plan = Plan.bare(self._schedule)
        if self._schedule.name.endswith(MOVED):
            plan = offload(plan, select_longest(self._schedule, 1.0))
        return [simulate(plan, costs).makespan_ms for costs in self.costs]

    def bounds(self) -> list[float]:
        """Lower bounds of ``planned`` for any order of the same passes, without a memory limit."""
        on, m = self._schedule.placement, self._schedule.num_microbatches
        memory = PassMemory.uniform(on, 1.0)
        return [lower_bound(costs, memory, Workload(on, m), None, "makespan").value_ms for costs in self.costs]


def _measure(options: argparse.Namespace, num_microbatches: int) -> dict[str, Any]:
    names = [name for name in (*_STOCK, *OURS, *SLICED, *DIVIDED, *OFFLOADED) if name == STOCK or name in options.only]
    models = {_model(name) for name in names}
    jobs = {name: Job(options, num_microbatches, flags) for name, flags in _FLAGS.items() if name in models}
    with TemporaryDirectory() as folder:
        if jobs[STOCK].launch.rank == 0:
            print(f"M={num_microbatches}, hidden {options.hidden_size}")
        schedules = {name: replace(_schedule(name, options.num_ranks, num_microbatches), name=name) for name in names}
        variants = {
            name: _Variant(jobs.get(_model(name), jobs[STOCK]), schedule, Path(folder))
            for name, schedule in schedules.items()
        }
        fitting = [variant for name, variant in variants.items() if name.endswith(FITTED)]
        if fitting:
            ranks.interleaved(dict(variants), _TRIAL_ROUNDS, warm_up=0)
        for variant in fitting:
            variant.fit()
        times = ranks.interleaved(dict(variants), options.rounds)
    turns = slice(-options.rounds, None)
    stock_ms = variants[STOCK].planned()[turns]
    settings = {key: getattr(options, key) for key in _SETTINGS}
    rows: dict[str, dict[str, Any]] = {}
    for name, variant in variants.items():
        rows[name] = {
            "fitted_to": _json(variant.fitted_to),
            "rounds_ms": times[name],
            "allocated_gib": variant.allocated_bytes / 2**30,
            "reserved_gib": variant.reserved_bytes / 2**30,
        }
        if variant.costs:
            rows[name] |= {
                "predicted_time_over_stock": _median_ratio(variant.planned()[turns], stock_ms),
                "costs": [_json(costs) for costs in variant.costs[turns]],
            }
            if name not in (*SLICED, *DIVIDED, *OFFLOADED):
                rows[name]["bound_over_predicted_stock"] = _median_ratio(variant.bounds()[turns], stock_ms)
    return {"num_microbatches": num_microbatches, **settings, "variants": rows}


def _median_ratio(values: list[float], others: list[float]) -> float:
    return median(value / other for value, other in zip(values, others, strict=True))


def _json(costs: PassCosts | None) -> dict[str, Any] | None:
    return None if costs is None else asdict(costs) | {"links": []}


if __name__ == "__main__":
    sys.exit(main())
