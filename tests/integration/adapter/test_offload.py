"""Offloading changes no bit, frees the memory that it is planned to free, and leaves nothing on the host."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron.zero_bubble import PassMemory, Placement, Schedule, build
from megatron.zero_bubble.core.analysis.memory import host_peaks, message_peaks, most_kept
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.formats.moves import moves_content
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.core.ir.offload import Discard
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.offload import Move, parse_share, select_longest
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.integration.adapter.offloading import OffloadPart
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from tests.helpers import parity
from tests.helpers.faults import Fault, train_with_faults
from tests.helpers.parity import Layout, Outcome, assert_same_bits
from tests.helpers.ranks import RankFailure, RankPool
from tests.helpers.rows import some
from tests.integration.adapter.test_auto import FEW_STEPS, waiting_for_plans

ALL, HALF = "--zero-bubble-offload all", "--zero-bubble-offload 50%"
LARGE = "--seq-length 64 --max-position-embeddings 64 --hidden-size 32"
"""So large that what a layer saves is worth to move."""
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"

ROWS = {
    "1f1b": ("1f1b", Layout(4), 6, ""),
    "zb-h1": ("zb-h1", Layout(2), 4, ""),
    "zb-h1, dropout": ("zb-h1", Layout(2), 4, "--attention-dropout 0.1 --hidden-dropout 0.1"),
    "zb-h1, full recompute": (
        "zb-h1",
        Layout(2, num_layers=4),
        4,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "zb-h1, selective recompute": ("zb-h1", Layout(2), 4, "--recompute-granularity selective"),
    "zb-h2, bf16": ("zb-h2", Layout(4), 6, "--bf16"),
    "zb-v": ("zb-v", Layout(2, num_layers=4), 4, ""),
    "interleaved": ("interleaved-1f1b", Layout(2, num_layers=4), 4, CHUNKS),
    "gis": ("gis", Layout(2, num_layers=4), 4, CHUNKS),
    "pipe-offload": ("pipe-offload", Layout(2, num_layers=4), 4, CHUNKS),
    "slices": ("seq-1f1b", Layout(2), 4, "--zero-bubble-num-slices 2"),
    "slices, split backward, recompute": (
        "seq-zb-h1",
        Layout(2),
        3,
        "--zero-bubble-num-slices 3 --seq-length 96 --max-position-embeddings 96 --recompute-granularity selective",
    ),
    "vocabulary, algorithm 1": ("zb-h1", Layout(2), 4, "--zero-bubble-vocabulary-parallel 1"),
    "vocabulary, algorithm 2": ("1f1b", Layout(2), 4, "--zero-bubble-vocabulary-parallel 2"),
}
QUICK = {"zb-h1, dropout", "zb-h1, full recompute", "zb-v", "pipe-offload", "vocabulary, algorithm 1"}


def train(rank: int, flags: str, schedules: Sequence[str | None]) -> list[tuple[Outcome, int]]:
    """Train with each schedule; return the outcomes, and the peaks of host memory in bytes."""
    start, outcomes = None, []
    for args, pipeline in parity._under_each(flags, schedules):
        outcome, start = parity._train_once(args, parity._splits(args), start, pipeline)
        offloading = None if pipeline is None else pipeline.part(OffloadPart)
        outcomes.append((outcome, 0 if offloading is None else offloading.host_peak))
    return outcomes


@pytest.mark.parametrize("row", some(ROWS, *QUICK))
def test_same_bits_as_without_offload(ranks: RankPool, row: str) -> None:
    name, layout, num_microbatches, options = ROWS[row]
    runs = [name, f"{name} {ALL}", f"{name} {HALF}"]
    results = ranks.run(
        layout.num_ranks, train, layout.flags(num_microbatches, f"{LARGE} {options}"), runs, timeout=120
    )
    assert_same_bits([[outcome for outcome, _ in of_rank] for of_rank in results], runs)
    none, all_, half = (peak for _, peak in results[0])
    assert none == 0 < half <= all_


def test_schedule_file_moves_what_its_plan_moves(ranks: RankPool, tmp_path: Path) -> None:
    """A file with moves leaves nothing else to request."""
    schedule = build("zb-h2", num_ranks=2, num_microbatches=4)
    moves = [Move(Pass(0, Kind.F, 1), out=2, back=1, after=1), Move(Pass(1, Kind.F, 2), 0, 0)]
    file = tmp_path / "plan.json"
    timeline = simulate(schedule, even_costs(schedule.placement))
    file.write_text(plan_to_json(timeline, more=moves_content(moves)))
    planned = f"--zero-bubble-schedule-file {file}"
    runs = ["zb-h2", planned, f"zb-h2 {ALL}"]
    results = ranks.run(2, train, Layout(2).flags(4, LARGE), runs, timeout=120)
    assert_same_bits([[outcome for outcome, _ in of_rank] for of_rank in results], runs)
    of_first, of_second = ([peak for _, peak in of_rank] for of_rank in results)
    assert of_first[0] == 0 < of_first[1] < of_first[2]
    assert of_second[0] == 0 < of_second[1]


def train_and_wait_for_the_plan(rank: int, flags: str, schedules: Sequence[str | None]) -> tuple[Any, list[str]]:
    """As ``train``; also returns the messages of the planner of zb-auto."""
    with waiting_for_plans() as said:
        return train(rank, flags, schedules), said


ROLLED_BACK = ("zb-h1", "zb-v", "interleaved-1f1b", "gis", "gis-h", "pipe-offload")


@pytest.mark.full
def test_same_bits_when_the_schedule_is_switched(ranks: RankPool) -> None:
    """The schedules of zb-auto move other microbatches, before and after the switch."""
    layout, runs = Layout(2, num_layers=4), [None, f"zb-auto {ALL}"]
    flags = layout.flags(5, f"{LARGE} --train-iters {FEW_STEPS}")
    results = ranks.run(2, train_and_wait_for_the_plan, flags, runs, timeout=200)
    assert_same_bits([[outcome for outcome, _ in of_rank] for of_rank, _ in results], runs, FEW_STEPS)
    assert set(results[0][1]) == {"switched to the planned schedule: zb-auto, 1 slices"}
    assert results[0][0][1][1] > 0, "nothing was on the host"


@pytest.mark.parametrize("name", ["zb-h2", *(pytest.param(name, marks=pytest.mark.full) for name in ROLLED_BACK)])
def test_same_bits_with_rollbacks(ranks: RankPool, name: str) -> None:
    """Steps are rejected while activations are on the host: the repeated passes save, move and fetch them again."""
    layout, count = Layout(2, num_layers=4), 6
    flags = f"{LARGE} --clip-grad 100 --train-iters 8 --zero-bubble-post-validation"
    schedule = build(name, num_ranks=2, num_microbatches=count)
    plan = plan_of(schedule, Additions(post_validation=True, moves=tuple(select_longest(schedule, 1.0))))
    assert any(isinstance(op, Discard) for op in plan.drain[0]), "something must be on the host when ranks stop"
    chunks = "" if name in ("zb-h1", "zb-h2", "zb-v") else CHUNKS
    flags = layout.flags(count, f"{flags} --zero-bubble-schedule {name} --zero-bubble-exact {chunks}")
    faults = [Fault(4, 1, 0, 1e6), Fault(6, 0, 2, 1e6)]
    results = ranks.run(2, train_with_faults, flags, ["", ALL], faults, True, timeout=120)
    assert_same_bits(results, ["kept", "offloaded"], steps=8)
    for mode in (0, 1):
        assert sum((outcomes[mode].counts for outcomes in results), Counter())["repeated"], "no step was rejected"


SEQUENCE, SAMPLES, HIDDEN, VOCABULARY, LAYERS = 64, 2, 128, 256, 8


def build_model(num_ranks: int) -> Any:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        pipeline_model_parallel_size=num_ranks,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def samples() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=generator)


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    text = next(data)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    losses = model(text[:, :-1], torch.arange(SEQUENCE).expand(SAMPLES, -1), mask, labels=text[:, 1:])
    return losses, lambda output: (output.mean(), {"loss": output.mean().item().hex()})


def device_peak(trace: Path) -> int:
    """The most bytes that torch's CPU allocator had given out, above what it had when the profiler started."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    totals = [int(event["args"]["Total Allocated"]) for event in events]
    return max(totals) - (totals[0] - int(events[0]["args"]["Bytes"]))


class Measured(NamedTuple):
    """A profiled iteration of one rank.

    Attributes:
        device: the most bytes that torch's allocator had given out.
        host: the most bytes of host memory.
        of_a_pass: what passes allocate for themselves: the peak with one microbatch, without its activations.
        memory: M_B and M_W by stage, measured from the tensors.
    """

    device: int
    host: int
    of_a_pass: float
    memory: PassMemory


LARGER = (
    "--seq-length 64 --max-position-embeddings 64 --hidden-size 128 --position-embedding-type rope --vocab-size 250 "
    "--untie-embeddings-and-output-weights --no-bias-gelu-fusion"
)
"""So large that activations are most of what is allocated; a fused GeLU has larger temporaries."""


def measuring_pipelines(flags: str, schedules: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """As ``parity._under_each``, with pipelines that measure the memory of a microbatch."""
    from megatron.zero_bubble.integration import patching

    apply = patching.apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patching, "apply", lambda config: apply(replace(config, measure_memory=True)))
        yield from parity._under_each(flags, schedules)


def measure(
    rank: int, folder: Path, flags: str, schedule: str, options: Sequence[str], at_once: bool
) -> list[Measured]:
    """Per entry of ``options``, run an iteration that measures a microbatch, and one under torch's profiler.

    Args:
        at_once: whether passes wait for each copy where it starts, instead of running meanwhile.
    """
    from megatron.core import parallel_state

    from pretrain import checkpoint, loop, model
    from pretrain.data.shares import Share

    start, measured, of_a_pass = None, [], 0.0
    for args, pipeline in measuring_pipelines(flags, [f"{schedule} {option}" for option in options]):
        chunks, start = parity._build(args, start)
        optimizer = model.build_optimizer(args, chunks)
        model.connect(args, chunks, optimizer)
        samples, trained = parity._splits(args), checkpoint.TrainedObjects(chunks, optimizer, None)
        device, state = torch.device("cpu"), checkpoint.TrainState()
        trainer = loop.Trainer(args, select("cpu"), device, trained, samples, args.vocab_size, state, None)  # type: ignore[arg-type]
        count = args.global_batch_size // args.batch_sizes.granule
        offloading = pipeline.part(OffloadPart)
        if at_once and offloading is not None:
            offloading._select = partial(select_longest, share=1.0, out=0, back=0)

        def profiled(count: int, trainer: Any = trainer, samples: Any = samples) -> int:
            trainer._zero_gradients()
            gc.collect()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as trace:
                trainer._passes(trainer._microbatches(samples.train, 0), Share(count, None, 0, 0))
            trace.export_chrome_trace(str(folder / f"{rank}.json"))
            return device_peak(folder / f"{rank}.json")

        trainer._passes(trainer._microbatches(samples.train, 0), Share(count, None, 0, 0))
        memory = pipeline.memory.gather(parallel_state.get_pipeline_model_parallel_group())
        if not measured:
            stages = args.placement.stages_of(parallel_state.get_pipeline_model_parallel_rank())
            of_a_pass = profiled(1) - sum(memory.activation[stage] for stage in stages)
        peak = profiled(count)
        host = 0 if offloading is None else offloading.host_peak
        measured.append(Measured(peak, host, of_a_pass, memory))
    return measured


CHUNKED = ("interleaved-1f1b", "gis", "gis-h", "pipe-offload")
MESSAGE = 64 * 2 * 128 * 4
"""Bytes of a message: 64 tokens, 2 sequences, hidden size 128, float32. It is a twentieth of what a chunk keeps."""


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.full) for name in ("1f1b", "zb-h1", "zb-h2", *CHUNKED)), "zb-v"]
)
def test_peaks_are_as_planned(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """On the device by torch's own profiler, and on the host: the plan with its messages, plus 5 %, plus what a pass
    itself needs."""
    count, shares = 8, ["none", "50%", "all"]
    flags = Layout(4, num_layers=8).flags(count, f"{LARGER} {CHUNKS if name in CHUNKED else ''}")
    options = [f"--zero-bubble-offload {share}" for share in shares]
    rows = ranks.run(4, measure, tmp_path, flags, name, options, False, timeout=240)
    schedule = build(name, num_ranks=4, num_microbatches=count)
    memory = rows[0][0].memory
    assert {measured.memory for row in rows for measured in row} == {memory}, "offloading must not change M_B or M_W"
    of_one = message_peaks(plan_of(build(name, num_ranks=4, num_microbatches=1)))
    for place, share in enumerate(shares):
        plan = plan_of(schedule, Additions(moves=tuple(select_longest(schedule, parse_share(share)))))
        planned = most_kept(simulate(plan, even_costs(schedule.placement), memory), memory)
        messages = message_peaks(plan)
        for rank, (kept, host) in enumerate(zip(planned, host_peaks(plan, memory), strict=True)):
            measured, own = rows[rank][place], kept + messages[rank] * MESSAGE
            of_a_pass = measured.of_a_pass - of_one[rank] * MESSAGE
            assert 0 < of_a_pass < 0.5 * sum(memory.activation) / 4, "less than a microbatch keeps"
            assert measured.device <= 1.05 * own + of_a_pass, f"rank {rank}, {share}"
            assert 0.9 * host <= measured.host <= host, f"rank {rank}, {share}"
    # On a V, half of the microbatches are all those of the stage that keeps them long, so the peaks may be equal.
    assert rows[0][2].device <= 1.001 * rows[0][1].device < rows[0][0].device


def test_a_fifth_of_the_memory_remains_if_passes_wait_for_copies(ranks: RankPool, tmp_path: Path) -> None:
    flags = Layout(4, num_layers=8).flags(8, LARGER)
    options = ["--zero-bubble-offload none", "--zero-bubble-offload all"]
    (kept, moved), *_ = ranks.run(4, measure, tmp_path, flags, "zb-h2", options, True, timeout=240)
    assert moved.device <= 0.20 * kept.device


def fail_then_train(rank: int, folder: Path) -> tuple[int, int, bool, int]:
    """Run an iteration whose fourth forward raises, then a whole one; return what is left on the host by the first, how
    much it had moved, whether hooks are left, and what is pending after the second.
    """
    from megatron.core import parallel_state

    import megatron.zero_bubble

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1, create_gloo_process_groups=False)
    model = build_model(1)
    order = tuple(Pass(0, kind, n) for kind in (Kind.F, Kind.B, Kind.W) for n in range(4))
    schedule, file = Schedule("all forwards first", Placement.linear(1), 4, (order,)), folder / "plan.json"
    file.write_text(plan_to_json(simulate(schedule, even_costs(schedule.placement))))
    config = ZeroBubbleConfig(schedule_file=str(file), offload="all")
    pipeline = megatron.zero_bubble.apply(config)
    calls = []

    def failing(data: Any, chunk: Any) -> Any:
        calls.append(forward_step(data, chunk))
        if len(calls) == 4:
            raise ArithmeticError("no such number")
        return calls[-1]

    def run(step: Any) -> None:
        pipeline.forward_backward(
            forward_step_func=step,
            data_iterator=samples(),
            model=[model],
            num_microbatches=4,
            seq_length=SEQUENCE,
            micro_batch_size=SAMPLES,
        )

    try:
        with pytest.raises(ArithmeticError):
            run(failing)
        offloading = pipeline.part(OffloadPart)
        assert offloading is not None
        left, moved = offloading.num_pending, offloading.host_peak
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        run(forward_step)
        return left, moved, hooks, pipeline.num_pending
    finally:
        megatron.zero_bubble.revert()


def test_failed_iteration_leaves_nothing_on_the_host(ranks: RankPool, tmp_path: Path) -> None:
    ((left, moved, hooks, pending),) = ranks.run(1, fail_then_train, tmp_path)
    assert moved > 0
    assert (left, hooks, pending) == (0, False, 0)


def test_exceeded_limit_of_host_memory_ends_the_run(ranks: RankPool) -> None:
    """In one sentence, and without a rank that waits for ever."""
    flags = Layout(2).flags(6, LARGE)
    with pytest.raises(
        RankFailure, match="must fit in --zero-bubble-host-memory, 512000 bytes per rank; this rank has"
    ):
        ranks.run(2, train, flags, [f"zb-h2 {ALL} --zero-bubble-host-memory 500KiB"], timeout=60)
