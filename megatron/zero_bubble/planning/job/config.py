"""The user's options as one frozen value, and the checks of options against each other."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.costs.cuts import balanced
from megatron.zero_bubble.core.costs.units import checked_share, parse_bytes, parse_memory_limit
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import read_costs_file
from megatron.zero_bubble.core.formats.plan import PlanFile, read_plan_file
from megatron.zero_bubble.core.ir import Placement, Slices
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.plan import PostReceives
from megatron.zero_bubble.core.plan.nccl import DEFAULT_NCCL_COLLECTIVE_CTAS, DEFAULT_NCCL_CTAS, Ctas
from megatron.zero_bubble.core.plan.offload import MoveSelection, parse_share, select_longest
from megatron.zero_bubble.core.plan.shard import DEFAULT_OPEN_CHUNKS, Sharding
from megatron.zero_bubble.core.schedules import has_units, recipe
from megatron.zero_bubble.core.schedules.recipe import DEFAULT_SLICES
from megatron.zero_bubble.core.search.placements import HAS_CHUNKS, PlacementName
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.job.effects import EFFECTS
from megatron.zero_bubble.planning.job.planned import decisions, is_file
from megatron.zero_bubble.planning.offload import AUTO
from megatron.zero_bubble.planning.rule import check
from megatron.zero_bubble.planning.setup import AUTO_LIMIT, DEFAULT_LIMIT
from megatron.zero_bubble.planning.source import ZB_AUTO, ScheduleSource, SourceOnRanks, UnitChoice

_POSITIVE = ("nccl_ctas", "nccl_collective_ctas", "whole_stages", "unit_microbatches", "peer_timeout_s")


@dataclass(frozen=True)
class ZeroBubbleConfig:
    """Options of zero-bubble training.

    Attributes:
        schedule: a name from ``zero-bubble list``, or ``zb-auto``, which measures the run and plans a schedule for it;
            or a file, as ``schedule_file``, which ends in ``.json`` or has a folder in its path. Exactly one of
            ``schedule`` and ``schedule_file`` must be given.
        num_chunks: stages per rank of an interleaved schedule, or of ``zb-auto`` on a loop or in a wave; None selects
            the default of the schedule or placement.
        num_slices: slices into which a schedule of slices or ``zb-auto`` cuts every sequence; None selects the
            schedule's default, for ``zb-auto`` whole sequences.
        slice_ends: the ends of the slices in tokens, instead of ``num_slices``; the last one is the sequence length.
        attention_share: share of a forward that attention takes, for cuts after which all slices take equal time; None
            for equally long slices.
        vocabulary: algorithm, 1 or 2, with which embedding and output layer are divided over all pipeline ranks; None
            leaves them on the first and the last stage.
        recompute_logits: with ``vocabulary``, compute the logits again for the weight gradient of the output layer
            instead of keeping their softmax.
        placement: stage placement for ``zb-auto``; needed up front because the model is built before the plan is made.
        schedule_file: a file written by ``zero-bubble plan --format json``. It is read once, here. Fields that it
            decides (``vocabulary``, ``recompute_logits``, ``shard_weights``, ``unit_microbatches``, ``whole_stages``)
            are set; one that is given and differs is refused.
        plan: the content of ``schedule_file``, if it has been read already.
        overlap_experts: hide the all-to-all of experts: run forwards together with backwards, layer by layer, so that
            each hides that of the other, or, in a schedule without such pairs, run the weight gradients of the experts
            beneath the dispatch of their own backward.
        keep_faster: ``zb-auto`` begins with Megatron's own schedule of its placement, if there is one, and goes back to
            what it began with if its plan proves slower.
        memory_limit: activation-memory limit per rank for ``zb-auto``, and for ``zero-pp`` without
            ``unit_microbatches``, in the units of ``zero-bubble plan --memory-limit``; ``1p`` is the peak of 1F1B, or
            of the schedule that the run begins with, if it is larger. ``auto`` is what is free on the fullest rank, as
            the first iterations measure it, for ``zb-auto``. None is ``1p`` for ``zb-auto``, and else no limit.
        post_validation: step the optimizer before the global gradient norm is known; validate in the next iteration.
        rollback: how to undo a rejected optimizer step. ``exact`` keeps a copy of the overwritten state until the step
            is validated; ``inverse`` inverts the Adam update, which needs no memory and is correct only up to rounding.
        exact: round each weight gradient to the weight's dtype before it is accumulated, which gives stock Megatron's
            result bit for bit. False accumulates the weight gradients of a W pass in one call, directly into Megatron's
            float32 buffers.
        fuse_wgrad: the opposite of ``exact``, by its older name; False sets ``exact``.
        post_receives: when a rank posts the receive of a message: one pass ahead of the pass that needs it (``early``),
            so that the transfer overlaps the previous pass, or directly before that pass (``late``). A receive of NCCL
            occupies multiprocessors of the GPU until the message has arrived.
        nccl_ctas: the largest number of CTAs, and so of multiprocessors, that NCCL occupies for a message between two
            pipeline ranks. The job's own NCCL options for its pipeline take precedence.
        nccl_collective_ctas: the same for a collective of ``vocabulary``, which moves as much as a message, and more in
            float32, but waits less.
        offload: which activations are in host memory between forward and backward: ``all`` of them, the given share of
            each rank's microbatches, such as ``50%``, longest lifespan first, ``auto`` for those that delay no pass, as
            planned from measured passes and copies, or ``none``. Activations whose backward follows too closely stay
            on the device. None is what ``schedule_file`` moves, and nothing without its moves.
        host_memory: limit per rank for what moves, for example ``60GiB``; None for no limit.
        shard_weights: keep of each chunk only a shard per data-parallel replica: gather its weights whenever its passes
            need them, once per unit of microbatches, and reduce its gradients once per unit. At most ``whole_stages``
            chunks of a rank then have whole weights.
        unit_microbatches: microbatches of a unit of ``zero-pp``, after which ``shard_weights`` reduces gradients. None:
            ``zero-pp`` takes the smallest unit whose makespan equals that of a single unit, and other schedules take
            as many microbatches as there are pipeline ranks.
        costs_file: measured times and memory of an earlier run, by which ``zero-pp`` chooses its units if
            ``unit_microbatches`` is None; without it, passes count as equally long, and collectives take no time.
        whole_stages: the most stages of a rank whose weights are whole at a time with ``shard_weights``; None for 2, of
            which one is in use while the other is gathered.
        shard_transport: how the replicas of ``shard_weights`` exchange shards: by collectives, or on demand, which is
            experimental.
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
        if self.memory_limit is None and self.schedule == ZB_AUTO:
            object.__setattr__(self, "memory_limit", DEFAULT_LIMIT)
        if self.schedule == "auto":
            raise UserError(
                "schedule auto is decided from the flags of a job, by scripts/pretrain_gpt.py and by "
                "megatron.zero_bubble.launch; got it without them; give zb-auto, or what `zero-bubble advise` says"
            )
        if self.schedule is None and self.schedule_file is None:
            raise UserError("a configuration needs schedule or schedule_file; got neither; give one of them")
        if self.memory_limit is not None and (self.memory_limit != AUTO_LIMIT or self.schedule != ZB_AUTO):
            parse_memory_limit(self.memory_limit)
        self._read_file()
        object.__setattr__(self, "exact", self.exact or not self.fuse_wgrad)
        object.__setattr__(self, "fuse_wgrad", not self.exact)
        if self.host_memory is not None:
            parse_bytes(self.host_memory)
        if self.offload is not None and not self.plans_offload:
            parse_share(self.offload)
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UserError(f"{name} must be positive; got {value}; give a larger value, or leave it out")
        check(EFFECTS, self.choices)
        refuse_excluded(self.choices)
        self.cuts()

    def _read_file(self) -> None:
        """Read the schedule file, if there is one, and set the fields that it decides."""
        taken: dict[str, Any] = {"plan": None}
        refuse_excluded({"schedule": self.schedule, "schedule_file": self.schedule_file})
        if self.schedule is not None and is_file(self.schedule):
            taken |= {"schedule": None, "schedule_file": self.schedule}
        if (file := taken.get("schedule_file", self.schedule_file)) is not None:
            given = {of.name: None if (own := getattr(self, of.name)) == of.default else own for of in fields(self)}
            taken["plan"] = self.plan or read_plan_file(file)
            taken |= decisions(taken["plan"], file, given)
        for name, value in taken.items():
            object.__setattr__(self, name, getattr(type(self), name) if value is None else value)

    @property
    def choices(self) -> dict[str, Any]:
        """What differs from the defaults, and ``moves`` if the schedule file decides what moves to host memory."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        choices = {name: value for name, (value, default) in values.items() if value != default and name != "plan"}
        return choices | ({"moves": self.schedule_file} if self._files_moves else {})

    @property
    def _files_moves(self) -> bool:
        return self.offload is None and self.plan is not None and bool(self.plan.moves)

    @property
    def overlaps(self) -> bool:
        """Whether the all-to-all of experts runs beneath computation."""
        return self.overlap_experts or (self.plan is not None and self.plan.schedule.overlaps)

    @property
    def ctas(self) -> Ctas:
        """The CTAs of NCCL for messages and for collectives."""
        return Ctas(self.nccl_ctas, self.nccl_collective_ctas)

    def selection(self, source: ScheduleSource) -> MoveSelection | None:
        """How to select what leaves the device between forward and backward; None if nothing does."""
        if self.offload is None:
            return (lambda _: source.moves) if self._files_moves else None
        share = 1.0 if self.plans_offload else parse_share(self.offload)
        return functools.partial(select_longest, share=share) if share else None

    @property
    def plans_offload(self) -> bool:
        """Whether what moves is planned during the run, from its measurements; ``selection`` is for the time before."""
        return self.offload == AUTO

    @property
    def runs(self) -> Feasibility:
        """What a run of ``zb-auto`` adds to its plans; the GPUs are not known here."""
        moved = 0.0 if self.offload is None else 1.0 if self.plans_offload else parse_share(self.offload)
        # What is planned during the run is planned within the host memory.
        host = None if self.host_memory is None or self.plans_offload else parse_bytes(self.host_memory)
        return Feasibility(None, self.post_receives, self.post_validation, moved, host, self.ctas)

    def sharding(self, num_ranks: int) -> Sharding:
        """How chunks are sharded over their replicas with ``shard_weights``."""
        # The units of zero-pp end by themselves: backwards of another stage follow.
        unit = self.unit_microbatches or (1 if self._chooses_units else num_ranks)
        return Sharding(unit, self.whole_stages or DEFAULT_OPEN_CHUNKS)

    @property
    def _chooses_units(self) -> bool:
        return has_units(self.schedule) and self.unit_microbatches is None

    def cuts(self) -> Slices | None:
        """The cuts of sequences; None for the schedule's default.

        Raises:
            UserError: fewer than one slice, ends that do not increase, or a share that is not between 0 and 1.
        """
        if self.slice_ends is not None:
            return Slices.of_tokens(self.slice_ends)
        if self.attention_share is None:
            return None if self.num_slices is None else Slices.even(self.num_slices)
        share = checked_share("attention_share", self.attention_share)
        number = len(DEFAULT_SLICES) if self.num_slices is None else self.num_slices
        # A product of matrices takes equally long in F, B and W, and attention twice as long in B as in F.
        costs = PassCosts.uniform(Placement.linear(1), 1.0, 1.0 + share, 1.0 - share, attention=share)
        return balanced(costs, number)

    @property
    def takes_chunks(self) -> bool:
        """Whether ``num_chunks`` can be given: only for schedules selected by name, and a search with that choice."""
        return self.schedule is not None and (self.schedule != ZB_AUTO or self.placement in HAS_CHUNKS)

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
        if self.schedule_file is not None and self.plan is not None:
            source = ScheduleSource.of_plan(self.schedule_file, self.plan)
            return lambda _: source
        cuts, vocabulary = self.cuts(), self.vocabulary
        if self.schedule == ZB_AUTO:
            make = functools.partial(ScheduleSource.automatic, self.placement, num_chunks=self.num_chunks)
            return functools.partial(make, slices=cuts, vocabulary=vocabulary, post_receives=self.post_receives)
        assert self.schedule is not None, "either schedule or schedule_file is given"
        name, chunks = recipe(self.schedule).name, self.num_chunks
        units = self.unit_microbatches if has_units(name) else None
        whole = (self.whole_stages or DEFAULT_OPEN_CHUNKS) if self.shard_weights else None
        costs = None if self.costs_file is None else read_costs_file(self.costs_file)
        limit = self.memory_limit if self._chooses_units else None
        return functools.partial(
            ScheduleSource.by_name,
            name,
            num_chunks=chunks,
            slices=cuts,
            vocabulary=vocabulary,
            unit_microbatches=units,
            choice=UnitChoice(limit, costs, whole),
            overlaps=self.overlap_experts,
        )
