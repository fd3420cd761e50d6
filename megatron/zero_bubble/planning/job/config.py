"""The user's options as one frozen value, and the checks of options against each other."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from megatron.zero_bubble.core.costs.units import parse_bytes, parse_memory_limit
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import read_costs_file
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.plan import Additions, PostReceives
from megatron.zero_bubble.core.plan.nccl import DEFAULT_NCCL_COLLECTIVE_CTAS, DEFAULT_NCCL_CTAS, Ctas
from megatron.zero_bubble.core.plan.offload import MoveSelection, parse_share, select_longest
from megatron.zero_bubble.core.plan.shard import DEFAULT_OPEN_CHUNKS, Sharding
from megatron.zero_bubble.core.schedules import has_units, recipe
from megatron.zero_bubble.core.search.placements import HAS_CHUNKS, PlacementName
from megatron.zero_bubble.planning.codecs import speller
from megatron.zero_bubble.planning.cuts import slices_of
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.job.planned import run_of
from megatron.zero_bubble.planning.offload import AUTO
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import AUTO_LIMIT, Named, Searched, Setup, is_file
from megatron.zero_bubble.planning.source import ZB_AUTO, ScheduleSource, SourceOnRanks
from megatron.zero_bubble.planning.values import refuse_repeated, values_of

_POSITIVE = ("nccl_ctas", "nccl_collective_ctas", "whole_stages", "unit_microbatches", "peer_timeout_s")


@dataclass(frozen=True)
class ZeroBubbleConfig:
    """Options of zero-bubble training, the public face of ``Setup``.

    Every field that is not listed here does what the flag of its name does (docs/flags.md), and has its default.

    Attributes:
        schedule, schedule_file: a name from ``zero-bubble list`` or ``zb-auto``, or a plan file. Exactly one of them
            must be given; a ``schedule`` that ends in ``.json`` or has a folder in its path is a file too. ``setup``
            has what a file decides; a field that is given and differs is refused.
        vocabulary: 1 or 2, as ``--zero-bubble-vocabulary-parallel``; None for ``off``.
        early_recompute, recompute_logits: as ``--zero-bubble-recompute early`` and ``logits``.
        costs_file: as ``--zero-bubble-costs``.
        placement: it is needed up front, because the model is built before a plan is made.
        unit_microbatches, whole_stages: None for the default of the flag.
        fuse_wgrad: the opposite of ``exact``, by its older name.
        plan: the content of ``schedule_file``, if it has been read already.
        measure_memory: measure once how much memory a microbatch holds on each stage (see ``Pipeline.memory``).
        peer_timeout_s: seconds that a message may take before its peer is considered dead; None is the timeout that the
            job gives to init_process_group. With gloo, the wait then raises ``PeerError``; with NCCL, a thread prints
            the same message and ends the process after nine tenths of the time. A peer that exits closes its
            connections and is detected at once, whatever the timeout.
    """

    schedule: str | None = None
    num_chunks: int | None = None
    num_slices: int | None = None
    slice_ends: tuple[int, ...] | None = None
    attention_share: float | None = None
    vocabulary: Algorithm | None = None
    early_recompute: bool = False
    recompute_logits: bool = False
    placement: PlacementName = "linear"
    schedule_file: str | None = None
    plan: PlanFile | None = field(default=None, repr=False)
    overlap_experts: bool = False
    keep_faster: bool = False
    memory_limit: str | None = None
    post_validation: bool = False
    rollback: Literal["exact", "inverse"] = "exact"
    exact: bool = False
    fuse_wgrad: bool = True
    post_receives: PostReceives = "early"
    nccl_ctas: int = DEFAULT_NCCL_CTAS
    nccl_collective_ctas: int = DEFAULT_NCCL_COLLECTIVE_CTAS
    offload: str | None = None
    host_memory: str | None = None
    shard_weights: bool = False
    unit_microbatches: int | None = None
    costs_file: str | None = None
    whole_stages: int | None = None
    shard_transport: Literal["collective", "on-demand"] = "collective"
    measure_memory: bool = False
    peer_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.schedule == "auto":
            raise UserError(
                "schedule auto is decided from the flags of a job, by scripts/pretrain_gpt.py and by "
                "megatron.zero_bubble.launch; got it without them; give zb-auto, or what `zero-bubble advise` says"
            )
        if self.schedule is None and self.schedule_file is None:
            raise UserError("a configuration needs schedule or schedule_file; got neither; give one of them")
        if self.memory_limit is not None and (self.memory_limit != AUTO_LIMIT or self.schedule != ZB_AUTO):
            parse_memory_limit(self.memory_limit)
        if self.host_memory is not None:
            parse_bytes(self.host_memory)
        if self.offload is not None and self.offload != AUTO:
            parse_share(self.offload)
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UserError(f"{name} must be positive; got {value}; give a larger value, or leave it out")
        refuse_repeated(self._given, speller())
        if self.schedule_file is None and not is_file(self.schedule or ""):
            slices_of(self.setup.cuts)

    @classmethod
    def of(cls, run: RunOptions, measure_memory: bool = False, peer_timeout_s: float | None = None) -> ZeroBubbleConfig:
        """The configuration of a job; for the arguments, see the class."""
        given = {name: value for name, value in values_of(run.setup).items() if name != "layout"}
        return cls(**given, plan=run.setup.plan, measure_memory=measure_memory, peer_timeout_s=peer_timeout_s)

    @functools.cached_property
    def setup(self) -> Setup:
        """What the fields decide, and the plan file, which is read here.

        Raises:
            UserError: an invalid file, or a field that contradicts it.
        """
        return run_of(self._given, speller(), self.plan).setup

    @property
    def _given(self) -> dict[str, Any]:
        """The fields that differ from the defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default and name != "plan"}

    @property
    def ctas(self) -> Ctas:
        """The CTAs of NCCL for messages and for collectives."""
        return self.setup.messages.nccl

    def selection(self, source: ScheduleSource) -> MoveSelection | None:
        """How to select what leaves the device between forward and backward; None if nothing does."""
        if self.setup.moves_by_plan:
            return lambda _: source.moves
        share = 1.0 if self.plans_offload else self._share
        return functools.partial(select_longest, share=share) if share else None

    @property
    def plans_offload(self) -> bool:
        """Whether what moves is planned during the run, from its measurements; ``selection`` is for the time before."""
        return self.setup.offload is not None and self.setup.offload.share == AUTO

    @property
    def _share(self) -> float:
        """The share that moves; 0 where it is planned, or the plan file's."""
        share = None if self.setup.offload is None else self.setup.offload.share
        return 0.0 if share in (None, AUTO) else parse_share(share)

    @property
    def runs(self) -> Feasibility:
        """What a run of ``zb-auto`` adds to its plans; the GPUs are not known here."""
        setup = self.setup
        moved = 1.0 if self.plans_offload else self._share
        # What is planned during the run is planned within the host memory.
        limit = None if setup.offload is None or self.plans_offload else setup.offload.host_memory
        host = None if limit is None else parse_bytes(limit)
        return Feasibility(None, setup.messages.receives, setup.validates, moved, host, self.ctas)

    def additions(self, source: ScheduleSource, num_ranks: int, schedule: Schedule) -> Additions:
        """What the plan of a schedule has in addition to its passes."""
        select, shards = self.selection(source), self.setup.shards
        moves = () if select is None else tuple(select(schedule))
        return Additions(moves=moves, sharding=None if shards is None else self.sharding(num_ranks))

    def sharding(self, num_ranks: int) -> Sharding:
        """How chunks are sharded over their replicas, if they are."""
        whole = None if self.setup.shards is None else self.setup.shards.whole_stages
        # The units of zero-pp end by themselves: backwards of another stage follow.
        unit = self.setup.unit or (1 if has_units(self.setup.name) else num_ranks)
        return Sharding(unit, DEFAULT_OPEN_CHUNKS if whole in (None, AUTO) else int(whole))

    @property
    def takes_chunks(self) -> bool:
        """Whether ``num_chunks`` can be given: only for schedules selected by name, and a search with that choice."""
        order = self.setup.order
        return isinstance(order, Named) or (isinstance(order, Searched) and order.placement in HAS_CHUNKS)

    def placement_on(self, num_ranks: int) -> Placement:
        """The placement of the stages on ``num_ranks`` ranks; a schedule file ignores ``num_ranks`` and has its own.

        Raises:
            UserError: an unknown schedule, or a number of chunks that it does not support.
        """
        return self.sources()(num_ranks).placement

    def sources(self) -> SourceOnRanks:
        """The source of schedules as a function of the number of pipeline ranks.

        Raises:
            UserError: as ``placement_on``; a bad number of chunks is reported when the returned function is called.
        """
        order, costs = self.setup.order, None
        if isinstance(order, Named):
            recipe(order.name)
            costs = None if order.costs is None else read_costs_file(order.costs)
        return functools.partial(ScheduleSource.of, self.setup.unmeasured, costs=costs)
