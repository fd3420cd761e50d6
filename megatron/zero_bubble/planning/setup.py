"""``Setup``: what a job runs, one field per decision.

Flags, environment, plan file, advice and run hold this value; ``planning/codecs.py`` reads and writes it in the words
of each, by the table in ``planning/decisions.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.formats.plan import CSV, PlanFile
from megatron.zero_bubble.core.ir import Placement, Schedule, Slices
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, Divided, algorithm_of
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.plan import PostReceives
from megatron.zero_bubble.core.plan.nccl import DEFAULT_NCCL_COLLECTIVE_CTAS, DEFAULT_NCCL_CTAS, Ctas
from megatron.zero_bubble.core.plan.shard import check_chunks
from megatron.zero_bubble.core.schedules import ZB_AUTO, has_units, sliced
from megatron.zero_bubble.core.schedules.recipe import DEFAULT_SLICES
from megatron.zero_bubble.core.search.placements import HAS_CHUNKS, PlacementName, name_of, placements

DEFAULT_LIMIT = "1p"
"""Memory limit of ``zb-auto`` where none is given."""
DEFAULT_CUTS = len(DEFAULT_SLICES)
"""The number of slices under a schedule of slices, or with a share of attention, if none is given."""
LEAST_TOKENS = 1024
"""The fewest tokens of a slice whose number is chosen, if neither the user nor a run gives a number."""
AUTO_LIMIT = "auto"
"""Memory limit of ``zb-auto`` that the run measures: what is free on the fullest rank."""
BY_COST = "auto"
"""The layout of layers per stage that are chosen together with the schedule."""
Auto = Literal["auto"]
"""A value that the planner chooses; a job has none of them left open."""
Rollback = Literal["exact", "inverse"]
Transport = Literal["collective", "on-demand"]


@dataclass(frozen=True)
class Named:
    """A schedule by its name.

    Attributes:
        name: from ``zero-bubble list``, or ``auto`` for what a job decides when it starts.
        stages: per rank, of an interleaved schedule; None for its default.
        limit: activation-memory limit, by which units are chosen; None for no limit.
        costs: the costs file by which units are chosen; None for passes of equal length.
        equal_passes: whether a plan has it as published, for passes of equal length, as a job always has, instead of
            reordering its passes for the costs.
    """

    name: str
    stages: int | Auto | None = None
    limit: str | None = None
    costs: str | None = None
    equal_passes: bool = False

    @property
    def of_run(self) -> int | None:
        """The stages per rank of a run; None for the default."""
        assert self.stages != "auto", "a run has a number of stages"
        return self.stages


@dataclass(frozen=True)
class Searched:
    """``zb-auto``: a search.

    Attributes:
        placement: where the stages are; None for the default, which is ``linear`` for a run and ``auto`` for ``plan``.
        stages: per rank, of a placement that has a choice; None for its default.
        limit: activation-memory limit per rank; None for ``DEFAULT_LIMIT``.
        keep_faster: whether a run begins with Megatron's own schedule, and goes back to what it began with if its plan
            proves slower.
    """

    placement: PlacementName | Auto | None = None
    stages: int | Auto | None = None
    limit: str | None = None
    keep_faster: bool = False

    @classmethod
    def on(cls, placement: Placement, limit: str | None = None) -> Searched:
        """The search on one placement, which has a name."""
        name = name_of(placement)
        assert name is not None, "searches are tried on placements with a name"
        stages = placement.num_stages // placement.num_ranks if name in HAS_CHUNKS else None
        return cls(name, stages, limit)

    def placements(self, num_ranks: int) -> tuple[Placement, ...]:
        """Those that a plan chooses from."""
        return placements(self.placement or "auto", num_ranks, self.stages)

    @property
    def of_run(self) -> PlacementName:
        """The placement of a run."""
        assert self.placement != "auto", "a run has a placement"
        return self.placement or "linear"


@dataclass(frozen=True)
class Given:
    """A schedule, and all else that a plan decides, from a file.

    Attributes:
        file: its path.
        plan: its content, once it has been read.
    """

    file: str
    plan: PlanFile | None = field(default=None, compare=False, repr=False)


Order = Named | Searched | Given


@dataclass(frozen=True)
class Cuts:
    """How sequences are cut into slices.

    Attributes:
        number: of slices; None for the default, or what ``places`` has.
        places: equally long slices (``even``); slices that take equal time by the costs (``balanced``), or by the share
            of a forward that attention takes (a float); or their ends, as numbers of tokens or as shares of the
            sequence (a tuple). None leaves it to the planner.
        least_tokens: the fewest tokens of a slice if the number is to be chosen; it needs a known sequence length. None
            for what a run has measured, else ``LEAST_TOKENS``.
        among: the slices to choose from, once costs are known; empty before.
    """

    number: int | Auto | None = None
    places: Literal["even", "balanced"] | float | tuple[float, ...] | None = None
    least_tokens: int | None = None
    among: tuple[Slices, ...] = ()

    @property
    def are_whole(self) -> bool:
        """Whether sequences stay whole, where none are left to choose."""
        return len(self.among[0]) == 1

    @property
    def num_parts(self) -> int:
        """The parts of a sequence, of all choices together."""
        return sum(map(len, self.among))


@dataclass(frozen=True)
class Offload:
    """What moves to host memory between forward and backward.

    Attributes:
        share: ``all``, a share such as ``50%``, ``auto`` for what delays no pass, or ``none``; None for what a plan
            file moves.
        host_memory: limit of host memory per rank; None for no limit.
    """

    share: str | None = None
    host_memory: str | None = None


@dataclass(frozen=True)
class Shards:
    """Weights and gradients are divided over the data-parallel replicas, and gathered and reduced once per unit.

    Attributes:
        whole_stages: the most stages of a rank whose weights are whole at a time; None for the default.
        transport: how replicas exchange shards.
    """

    whole_stages: int | Auto | None = None
    transport: Transport = "collective"


@dataclass(frozen=True)
class Synchronous:
    """The optimizer steps when all ranks know the norm of the gradients."""


@dataclass(frozen=True)
class Validated:
    """The optimizer steps before, and the step is validated in the next iteration.

    Attributes:
        rollback: how a rejected step is undone.
    """

    rollback: Rollback = "exact"


@dataclass(frozen=True)
class Messages:
    """How messages and collectives of a pipeline are transferred.

    Attributes:
        receives: when the receive of a message is posted.
        ctas: the most CTAs that NCCL occupies for a message.
        collective_ctas: the same for a collective of all pipeline ranks.
    """

    receives: PostReceives = "early"
    ctas: int = DEFAULT_NCCL_CTAS
    collective_ctas: int = DEFAULT_NCCL_COLLECTIVE_CTAS

    @property
    def nccl(self) -> Ctas:
        """The CTAs of NCCL for messages and for collectives."""
        return Ctas(self.ctas, self.collective_ctas)


@dataclass(frozen=True)
class Setup:
    """What a job runs. The default is the job without this package.

    Attributes:
        order: the schedule: by name, searched, or from a file; None for Megatron's own.
        unit: microbatches of a unit of ``zero-pp``, after which sharded gradients are reduced; None for the best.
        cuts: of sequences into slices; None for whole sequences, or the default of a schedule of slices.
        vocabulary: how the embedding and the output layer are divided; None for not at all.
        offload: what moves to host memory; None for what a plan file moves.
        shards: how weights are sharded over replicas; None for whole weights.
        layout: the layers of every stage, as ``--pipeline-model-parallel-layout``, or ``auto``; None for those of the
            job's other flags.
        pairs: whether the all-to-all of experts runs beneath computation.
        step: when the optimizer steps.
        early_recompute: whether recomputation of whole layers is a pass of its own, before the backward.
        exact: whether each weight gradient is rounded as stock Megatron does.
        messages: how they are transferred.
    """

    order: Order | None = None
    unit: int | None = None
    cuts: Cuts | None = None
    vocabulary: Divided | None = None
    offload: Offload | None = None
    shards: Shards | None = None
    layout: str | None = None
    pairs: bool = False
    step: Synchronous | Validated = Synchronous()
    early_recompute: bool = False
    exact: bool = False
    messages: Messages = Messages()

    @property
    def plan(self) -> PlanFile | None:
        """The content of the file that it runs; None for another order."""
        return self.order.plan if isinstance(self.order, Given) else None

    @property
    def name(self) -> str:
        """The name of the schedule, or its file; ``none`` for Megatron's own."""
        if isinstance(self.order, Searched):
            return ZB_AUTO
        return "none" if self.order is None else self.order.file if isinstance(self.order, Given) else self.order.name

    @property
    def algorithm(self) -> Algorithm | None:
        """That of vocabulary parallelism in a run; None without it."""
        return None if self.vocabulary is None else self.vocabulary.of_run

    def work(self, placement: Placement, num_microbatches: int) -> Workload:
        """What its schedules of whole sequences put in order."""
        return Workload(placement, num_microbatches, vocabulary=self.algorithm)

    @property
    def moves_by_plan(self) -> bool:
        """Whether the file that it runs says what moves to host memory."""
        is_open = self.offload is None or self.offload.share is None
        return self.plan is not None and bool(self.plan.added.moves) and is_open

    @property
    def overlaps(self) -> bool:
        """Whether the all-to-all of experts runs beneath computation."""
        return self.pairs or (self.plan is not None and self.plan.schedule.overlaps)

    @property
    def is_cut(self) -> bool:
        """Whether a run of it cuts sequences."""
        return self.cuts is not None and not self.cuts.are_whole

    @property
    def can_cut(self) -> bool:
        """Whether its schedule is one of slices."""
        return self.name in (*sliced(), ZB_AUTO)

    @property
    def has_units(self) -> bool:
        """Whether its microbatches are in units."""
        return has_units(self.name) or self.shards is not None

    @property
    def inserts(self) -> bool:
        """Whether its schedules have passes of a divided vocabulary or of recomputation, or pairs, once their order is
        made.
        """
        return self.vocabulary is not None or self.pairs or self.early_recompute

    @property
    def divides(self) -> bool:
        """Whether its ranks hold parts of what they hold whole under Megatron's own schedule."""
        return self.vocabulary is not None or self.shards is not None

    @property
    def adds(self) -> bool:
        """Whether it decides more than an order of passes on the job's stages."""
        return self.inserts or any((self.offload, self.shards, self.layout))

    @classmethod
    def of(cls, schedule: Schedule) -> Setup:
        """What a schedule decides besides its order: slices, passes of the vocabulary, recomputation, and pairs."""
        algorithm = algorithm_of(schedule)
        divided = None if algorithm is None else Divided(algorithm)
        again = bool(schedule.recomputed)
        return cls(
            cuts=Cuts(among=(schedule.slices,)), vocabulary=divided, pairs=schedule.overlaps, early_recompute=again
        )

    @classmethod
    def of_plan(cls, plan: PlanFile) -> Setup:
        """What a plan file decides besides an order and its stages."""
        share, sharding = plan.offload or ("its moves" if plan.added.moves else None), plan.added.sharding
        setup = cls(
            cuts=Cuts(plan.schedule.num_slices, "even", among=(plan.schedule.slices,)),
            vocabulary=plan.divided,
            offload=None if share is None else Offload(share),
            early_recompute=bool(plan.schedule.recomputed),
        )
        if sharding is None:
            return setup
        return replace(setup, unit=sharding.unit_microbatches, shards=Shards(sharding.open_chunks))

    def check_placement(self, placement: Placement) -> None:
        """Raise UserError for stages that these decisions cannot have: one per rank, of sharded units."""
        if self.shards is not None:
            check_chunks(placement)

    def running(self, decided: Setup) -> Setup:
        """The same with what its schedules decide (see ``of``)."""
        among = () if decided.cuts is None else decided.cuts.among
        number = len(among[0]) if among else 1
        return replace(
            self,
            cuts=Cuts(number, "even", among=among) if number > 1 else None,
            vocabulary=decided.vocabulary and (self.vocabulary or decided.vocabulary),
            pairs=decided.pairs,
            early_recompute=decided.early_recompute,
        )

    def alone(self, asked: Setup, decided: Setup) -> Setup:
        """What a plan is asked for that makes one row of a comparison alone: its units and cuts as they were asked for,
        with the number of slices that it has.

        Args:
            asked: what was asked for of all rows.
            decided: what the schedule of the row decides (see ``of``).
        """
        own = self if self.shards is None else replace(self, shards=asked.shards, unit=asked.unit)
        if own.cuts is None or asked.cuts is None or decided.cuts is None:
            return own
        return replace(own, cuts=replace(asked.cuts, number=len(decided.cuts.among[0])))

    @property
    def objective(self) -> Metric:
        """The length that an iteration takes."""
        return "span" if self.validates else "makespan"

    @property
    def validates(self) -> bool:
        """Whether steps are validated in the next iteration."""
        return isinstance(self.step, Validated)

    @property
    def exchanges(self) -> bool:
        """Whether replicas exchange shards on demand."""
        return self.shards is not None and self.shards.transport == "on-demand"

    @property
    def unmeasured(self) -> Setup:
        """The same without what a search knows only when it has measured: a limit, and what to go back to."""
        if not isinstance(self.order, Searched):
            return self
        return replace(self, order=replace(self.order, limit=None, keep_faster=False))


def is_file(schedule: str) -> bool:
    """Whether a schedule is given as a plan file, and not by its name."""
    return schedule.endswith((".json", CSV)) or os.sep in schedule or "/" in schedule
