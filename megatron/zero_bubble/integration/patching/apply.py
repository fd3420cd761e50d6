"""Enable a schedule in megatron-core, observe its stock 1F1B, and revert either."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron.zero_bubble.core.costs.units import parse_bytes
from megatron.zero_bubble.core.errors import PatchError
from megatron.zero_bubble.core.ir import Kind, Placement, Schedule
from megatron.zero_bubble.core.plan.offload import MoveSelection
from megatron.zero_bubble.engine.measure.memory import MemoryMeter
from megatron.zero_bubble.engine.measure.recorder import Recorder
from megatron.zero_bubble.engine.optimizer.rollback import ROLLBACKS
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.runtime.observer import IterationObserver, Observers
from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
from megatron.zero_bubble.engine.wgrad.asked import answering
from megatron.zero_bubble.engine.wgrad.fused import FusedAccumulator
from megatron.zero_bubble.engine.wgrad.linear import split_linear
from megatron.zero_bubble.engine.wgrad.operands import reducing
from megatron.zero_bubble.integration.adapter.auto import AutoOptions, AutoSchedule
from megatron.zero_bubble.integration.adapter.auto_offload import AutoMoves
from megatron.zero_bubble.integration.adapter.dropout import DropoutNotice
from megatron.zero_bubble.integration.adapter.graph_slots import GraphSlots
from megatron.zero_bubble.integration.adapter.iteration import Slicing
from megatron.zero_bubble.integration.adapter.lengths import GivenShapes
from megatron.zero_bubble.integration.adapter.measured import Measured, Replanner
from megatron.zero_bubble.integration.adapter.model_stages import build_chunks
from megatron.zero_bubble.integration.adapter.offloading import OffloadPart
from megatron.zero_bubble.integration.adapter.on_demand import OnDemand
from megatron.zero_bubble.integration.adapter.options import Options
from megatron.zero_bubble.integration.adapter.part import Part
from megatron.zero_bubble.integration.adapter.pipeline import Pipeline
from megatron.zero_bubble.integration.adapter.placed import PlacedChunks
from megatron.zero_bubble.integration.adapter.placement import (
    add_tied_gradients,
    grouping_ends,
    last_stage_of,
    segment_of_stage,
)
from megatron.zero_bubble.integration.adapter.shards import Collectives, ShardedUnits
from megatron.zero_bubble.integration.adapter.stage_graphs import without_graphs
from megatron.zero_bubble.integration.adapter.unused import watch_first_step
from megatron.zero_bubble.integration.adapter.vocabulary.zeros import without_padding
from megatron.zero_bubble.integration.patching import bodies, dispatchers, transformer_engine, used
from megatron.zero_bubble.integration.patching.chunk_seams import BLOCK, count_seams, model_seams, segment_seams
from megatron.zero_bubble.integration.patching.recurrence_seams import continuing
from megatron.zero_bubble.integration.patching.replaced import Replaced, Replacement, around
from megatron.zero_bubble.integration.patching.seams import installed_seams
from megatron.zero_bubble.integration.patching.stock_passes import StockPasses
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.runnable import is_megatrons_own
from megatron.zero_bubble.planning.setup import Searched, Validated
from megatron.zero_bubble.planning.source import ScheduleSource, SourceOnRanks


class _Active(Replaced):
    """What is replaced; with a schedule, also its pipeline and the source of its schedules."""

    pipeline: Pipeline | None = None
    sources: SourceOnRanks | None = None

    def revert(self) -> None:
        self.pipeline = self.sources = None
        super().revert()


_active = _Active()
_ANY = 2
"""Some number of ranks: it may be unknown yet, and what is asked with it does not depend on it."""


def apply(
    config: ZeroBubbleConfig | str,
    observers: Sequence[IterationObserver] = (),
    say: Callable[[str], None] = print,
    source: ScheduleSource | None = None,
    parts: Sequence[Part] = (),
) -> Pipeline:
    """Make megatron-core's pipelines run the schedule of ``config``.

    Call it once, on every rank, before the model is built; ``get_forward_backward_func`` then returns our function.

    Args:
        config: the configuration, or the name of a schedule to run with default options.
        observers: notified of training iterations.
        say: prints, on rank 0, what ``zb-auto`` measured and planned, and the upstream functions whose bodies changed.
        source: the schedules of ``config``, if a job has already resolved them; by default they are resolved here,
            which may read a file.
        parts: more parts of the pipeline, after those of ``config``.

    Returns:
        the pipeline that now runs the iterations.

    Raises:
        PatchError: a second call without ``revert``.
        SeamError: an unsupported megatron-core, or an upstream name that is not as expected.
        ValueError: an unknown schedule or an invalid schedule file.
    """
    seams = installed_seams()
    config = ZeroBubbleConfig(schedule=config) if isinstance(config, str) else config
    of_options = (
        (used.POST_VALIDATION, config.setup.validates),
        (used.VOCABULARY, config.setup.vocabulary is not None),
        (seams.sharded_units, config.setup.shards is not None),
        (used.ON_DEMAND, config.setup.exchanges),
        (used.LAYER_PLANS, config.setup.overlaps),
    )
    used.look_up((*seams.used, *(name for names, is_used in of_options if is_used for name in names)))
    sources: SourceOnRanks = config.sources() if source is None else lambda _: source
    pipeline = _pipeline(config, sources, observers, say, parts)
    forward_backward = pipeline.forward_backward
    replacements: list[Replacement] = [
        (seams.schedule, lambda _: forward_backward),
        (seams.schedule_of_chunks, lambda _: forward_backward),
        (seams.linear, lambda original: split_linear(original, pipeline.store, pipeline.accumulate)),
        (seams.gradients, lambda original: answering(original, pipeline.store)),
        (seams.reduced, lambda original: reducing(original, pipeline.store.before_writing)),
        (seams.layer_graphs, around(without_graphs)),
    ]
    if config.setup.validates:
        replacements.append((seams.zeroed_gradients, around(_zeroing_later(pipeline))))
    if sources(_ANY).setup.is_cut:
        slicing = pipeline.part(Slicing)
        assert slicing is not None
        replacements += [(seam, around(slicing.balancing.loss)) for seam in seams.balanced]
        replacements += continuing(slicing.recurrences)
    placement_on = functools.cache(lambda num_ranks: sources(num_ranks).placement)
    if sources(_ANY).setup.vocabulary is not None:
        replacements += [(seam, without_padding) for seam in seams.counted_zeros]
    if not is_megatrons_own(placement_on(_ANY)):
        replacements += [
            (seams.last_stage, lambda original: last_stage_of(placement_on, original)),
            (seams.tied_gradients, add_tied_gradients),
            (seams.process_groups, lambda original: grouping_ends(original, placement_on)),
            *((seam, segment_of_stage) for seam in segment_seams()),
        ]
        in_force = PlacedChunks(lambda ranks: placement_on(ranks) if _active.pipeline is pipeline else None)
        replacements += [(seam, in_force.counting) for seam in count_seams()]
        replacements += [(seam, in_force.constructing_model) for seam in model_seams()]
        replacements.append((BLOCK, in_force.constructing))
        if source is None:  # a job places the chunks of its script itself
            builders = (each for seam in seams.models if seam.is_loaded() for each in seam.importers())
            replacements += [(seam, in_force.building) for seam in builders]
    replacements += dispatchers.timing(observers, seams.all_to_alls)
    slots = pipeline.part(GraphSlots)
    assert slots is not None, "every pipeline has slots"
    engine = transformer_engine.split(pipeline.store, functools.partial(_say_of_stage, say), seams.graphed, slots)

    def close() -> None:
        watch.remove()
        engine.close()
        pipeline.finish()
        pipeline.close()

    _replace([*replacements, *engine.replacements], close)
    watch = watch_first_step(config.setup.name, pipeline, _on_first_rank(say))
    _active.pipeline, _active.sources = pipeline, sources
    _name_changed_bodies(config, say)
    return pipeline


def observe(observers: Sequence[IterationObserver]) -> None:
    """Keep megatron-core's schedules, and notify ``observers`` of the passes of its 1F1B.

    Raises:
        PatchError, SeamError: as ``apply``.
    """
    seams = installed_seams()
    stock = StockPasses(Observers(observers))
    _replace(
        [
            (seams.schedule, around(stock.run)),
            (seams.forward_step, around(functools.partial(stock.step, Kind.F))),
            (seams.backward_step, around(functools.partial(stock.step, Kind.BW))),
        ]
    )


def build_stages(make_chunk: Callable[..., torch.nn.Module]) -> list[torch.nn.Module]:
    """Build the model chunks of this rank, where the schedule in force has its stages, for example on a V.

    For example::

        megatron.zero_bubble.apply("zb-v")
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2
        )
        config = TransformerConfig(..., virtual_pipeline_model_parallel_size=2)
        chunks = megatron.zero_bubble.build_stages(lambda **stage: GPTModel(config, ..., **stage))

    The same code serves schedules with one stage per rank, and, without ``apply``, Megatron's own.

    Args:
        make_chunk: makes one chunk from the arguments of megatron-core's ``GPTModel`` that depend on the stage, by
            keyword: ``pre_process`` (has the embedding), ``post_process`` (has the output layer), and, with several
            stages per rank, ``vp_stage`` and the process groups (``pg_collection``; ``model_comm_pgs`` in megatron-core
            0.14, none in 0.13). It must not wrap the chunk.

    Returns:
        the chunks in the order in which ``forward_backward_func(model=...)`` takes them.

    Raises:
        UserError: the schedule is for another number of pipeline ranks or of stages per rank than the model-parallel
            groups or the model's configuration; or the embedding group has other ranks than the first and last stage,
            where multi-token prediction on another stage needs ``ModelStages(..., layout=...)``. On every rank.
    """
    num_ranks = parallel_state.get_pipeline_model_parallel_group().size()
    if _active.sources is None:
        num_chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        return build_chunks(Placement.interleaved(num_ranks, num_chunks), False, make_chunk)
    source = _active.sources(num_ranks)
    return build_chunks(source.placement, source.setup.vocabulary is not None, make_chunk)


@contextmanager
def shapes(tokens: Sequence[int | tuple[int, int]] | None, source: int | None = None) -> Iterator[None]:
    """Context for calls of the forward-backward function whose microbatches have different, known lengths.

    For loops with ``config.variable_seq_lengths``: receives are then posted before their messages come, with the right
    shapes, and no headers are sent. For example::

        with megatron.zero_bubble.shapes([len(microbatch["tokens"]) for microbatch in microbatches]):
            get_forward_backward_func()(..., num_microbatches=len(microbatches))

    All ranks of a pipeline give the same list, which they compare. It does nothing without a schedule.

    Args:
        tokens: per microbatch, the tokens of its one sequence (packed or not), or a pair: the number of sequences, and
            the tokens of each. They are counted with padding, and before tensor and context parallelism divide them.
            None on ranks that do not know them.
        source: the pipeline rank that tells the list to the others, whose own does not count; None if all know it.

    Raises:
        UserError: a list with something else, or None without ``source``. The calls in this context raise it for a list
            of another length than ``num_microbatches``, for tokens that cannot be divided, and for different lists.
    """
    given = GivenShapes.of(tokens, source)
    with nullcontext() if _active.pipeline is None else _active.pipeline.shapes(given):
        yield


def disconnect() -> None:
    """Close the connections between the ranks of the pipeline; the next iteration opens them again.

    For loops that free memory, or destroy process groups, between iterations: all ranks of the job call it before. It
    does nothing without a schedule. Process groups that the loop has destroyed or rebuilt without this call are
    noticed by the next iteration.
    """
    if _active.pipeline is not None:
        _active.pipeline.disconnect()


def revert() -> None:
    """Restore all upstream names and close the pipeline; do nothing if no names are replaced."""
    _active.revert()


def report() -> list[str]:
    """One line per name that is currently replaced."""
    return _active.report()


def in_place_of(config: ZeroBubbleConfig) -> str:
    """The schedule of ``config`` and the names that it replaces, for a log: one phrase.

    A function that is replaced in several modules is named once.
    """
    replaced: dict[str, str] = {}
    for line in report():
        place = line.partition(":")[0].removeprefix("megatron.")
        replaced.setdefault(place if place.endswith("__") else place.rpartition(".")[2], place)
    name, places = config.setup.name, ", ".join(replaced.values())
    return f"schedule {name} in megatron-core {megatron.core.__version__}, in place of {places}"


def _replace(replacements: list[Replacement], close: Callable[[], None] = lambda: None) -> None:
    if _active:
        raise PatchError("megatron-core is already patched; call revert() before applying another configuration")
    _active.replace(replacements, close)


def _name_changed_bodies(config: ZeroBubbleConfig, say: Callable[[str], None]) -> None:
    if _is_first_rank():
        watched = (*bodies.SCHEDULE, *(bodies.OPTIMIZER if config.setup.validates else ()))
        for line in bodies.changed_bodies(megatron.core.__version__, watched):
            say(line)


def _is_first_rank() -> bool:
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0


def _say_of_stage(say: Callable[[str], None], line: str) -> None:
    """Print a line about the modules of this pipeline rank, on one of its replicas."""
    others = (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    if not any(others):
        say(line)


def _on_first_rank(say: Callable[[str], None]) -> Callable[[str], None]:
    """``say`` on the first rank, as it is known when there is something to say."""
    return lambda line: say(line) if _is_first_rank() else None


def _pipeline(
    config: ZeroBubbleConfig,
    sources: SourceOnRanks,
    observers: Sequence[IterationObserver],
    say: Callable[[str], None],
    more: Sequence[Part] = (),
) -> Pipeline:
    memory, said = MemoryMeter(), say if _is_first_rank() else None
    timeout = None if config.peer_timeout_s is None else timedelta(seconds=config.peer_timeout_s)
    make: Callable[[int, int], Schedule] = functools.cache(lambda ranks, count: sources(ranks).make(count))
    setup = config.setup
    parts: list[Part] = [DropoutNotice(said)] if isinstance(setup.order, Searched) else []
    planners: list[Replanner] = []
    options = Options(timeout, setup, ROLLBACKS[setup.step.rollback] if isinstance(setup.step, Validated) else None)
    if (select_moves := config.selection(sources(_ANY))) is not None:
        limit = None if config.host_memory is None else parse_bytes(config.host_memory)
        moves: MoveSelection = functools.cache(select_moves)
        if config.plans_offload:
            moves = planned = AutoMoves(memory, limit, say)
            planners.append(planned)
        parts.append(OffloadPart(moves, limit, said))
    if isinstance(setup.order, Searched):
        auto = AutoSchedule(AutoOptions(setup, config.runs), memory, say)
        make, options = auto.make, replace(options, is_settled=auto.is_settled)
        planners.append(auto)
    parts.append(GraphSlots())
    if setup.shards is not None:
        transport = OnDemand(timeout) if config.setup.exchanges else Collectives()
        parts.append(ShardedUnits(config.sharding, transport, timeout))
    if planners:
        passes = Recorder(select("auto"))
        observers = (Measured(passes, planners), *observers, passes)
    measures = memory if config.measure_memory or planners else None
    return Pipeline(make, [*parts, *more], observers, measures, options, _accumulator(config), said)


def _accumulator(config: ZeroBubbleConfig) -> GradAccumulator:
    return GradAccumulator() if config.setup.exact else FusedAccumulator()


def _zeroing_later(pipeline: Pipeline) -> Callable[..., None]:
    def zero_grad_buffer(
        original: Callable[..., None], chunk: DistributedDataParallel, *args: Any, **named: Any
    ) -> None:
        zero = functools.partial(original, chunk, *args, **named)
        if pipeline.optimizer is not None and pipeline.optimizer.steps(chunk):
            pipeline.optimizer.zero(zero)
        else:
            zero()

    return zero_grad_buffer
