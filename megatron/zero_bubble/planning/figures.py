"""Costs of a pipeline, and the conversion of memory limits to their unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from operator import mul
from typing import Any, NamedTuple

from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.devices import Device
from megatron.zero_bubble.core.costs.layers import LayerCosts
from megatron.zero_bubble.core.costs.static import StageBytes
from megatron.zero_bubble.core.costs.tensor import TensorParallelModel
from megatron.zero_bubble.core.costs.units import BYTES, checked_figure, parse_memory_limit, refuse_huge
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile
from megatron.zero_bubble.core.formats.facts import Facts
from megatron.zero_bubble.core.formats.pattern import layout_words
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.core.search.cut import even
from megatron.zero_bubble.planning.division import Division
from megatron.zero_bubble.planning.given import NOTHING, Bandwidth, GivenFigures
from megatron.zero_bubble.planning.weights import ModelWeights, Weights

HALVED = (
    "the stages of the costs differ, and are divided evenly into stages of a finer placement, but an "
    "output layer or a layer cannot be divided; record the costs under a schedule with as many stages per rank, or add "
    "layers_per_stage to the costs file."
)
"""Why the plan is a lower bound for a schedule with more stages than its costs were measured for."""
_TWO_STAGES = (
    "The embedding is assumed to take no time, because costs of two stages do not tell it from layers: what the last "
    "stage takes beyond its layers is the output layer's."
)


@dataclass(frozen=True)
class Figures:
    """Costs of a pipeline; ``on(placement)`` returns them per stage for any placement on its ranks.

    Attributes:
        make: the pass costs and pass memory for the stages of a placement, without what is ``given``.
        memory_given: whether the user gave memory figures; otherwise memory is counted in microbatches.
        message_bytes: bytes of a message between two stages; None if unknown.
        widths: by stage of the job's placement, the factor by which what it hands on exceeds a message; empty if none.
        most_layers: the largest number of layers on one rank; None if unknown.
        weights: bytes of weights, gradients and optimizer state; None if unknown.
        notes: the assumptions made, as sentences.
        sequence: tokens of a sequence; None if unknown.
        layers: costs per layer; None if unknown.
        counts_weights: whether a rank holds ``weights``; with sharded units, it holds what their plan says.
        tensor: the model that a group of GPUs may divide instead of replicas; None if unknown.
        base: the figures whose microbatches and 1F1B are the units of memory, if not these: with layouts, those of the
            even split, so that all have the same limit.
        division: which layers are on which stage; None if unknown.
        file: the costs file that they are from, whose stages may be too coarse for a placement; None for estimates.
        facts: those of the job; empty if unknown.
        operations: floating-point operations of the model per token, see ``estimate.operations``; None if unknown.
        given: what replaces figures of the costs.
        laid: the layers per stage of the one placement that these figures are for; empty for those of any placement.
    """

    num_ranks: int
    num_microbatches: int
    make: Callable[[Placement], tuple[PassCosts, PassMemory]]
    memory_given: bool = False
    message_bytes: float | None = None
    widths: tuple[float, ...] = ()
    most_layers: int | None = None
    weights: Weights | None = None
    notes: tuple[str, ...] = ()
    sequence: int | None = None
    layers: LayerCosts | None = None
    counts_weights: bool = True
    base: Figures | None = None
    tensor: TensorModel | None = None
    division: Division | None = None
    file: CostsFile | None = field(default=None, hash=False)
    facts: Facts = field(default_factory=dict, hash=False)
    operations: float | None = None
    given: GivenFigures = NOTHING
    laid: tuple[int, ...] = ()
    _made: dict[Placement, tuple[PassCosts, PassMemory]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Make the costs of a placement once, also where others are ``given`` in place of some."""
        if not hasattr(self.make, "cache_info"):
            object.__setattr__(self, "make", cache(self.make))

    def on(self, placement: Placement) -> tuple[PassCosts, PassMemory]:
        """The pass costs and pass memory for the stages of a placement, made once.

        Raises:
            UserError: for a placement that the costs are not for.
        """
        if placement not in self._made:
            costs, memory = self.make(placement)
            if self.given != NOTHING:
                costs = self.given.replacing(costs, memory, self.sizes_on(placement), placement)
            self._made[placement] = costs, memory
        return self._made[placement]

    def widths_on(self, placement: Placement) -> tuple[float, ...]:
        """``widths`` for the stages of a placement; empty if the job has others, or all are 1. Rows of a divided
        embedding travel with the hidden states to multi-token prediction.
        """
        own = self.widths if len(self.widths) == placement.num_stages else ()
        division = self.division if self.layers is not None and self.layers.is_divided else None
        if division is None or (at := division.predicting(placement)) is None:
            return own
        return tuple(width + (stage < at) for stage, width in enumerate(own or (1.0,) * placement.num_stages))

    @property
    def of_ranks(self) -> tuple[PassCosts, PassMemory]:
        """Those of whole ranks, with one stage each."""
        return self.on(Placement.linear(self.num_ranks))

    def build(self, name: str, **more: Any) -> Schedule:
        """Build a schedule by name for these sizes, with further arguments of ``build``."""
        return build(name, num_ranks=self.num_ranks, num_microbatches=self.num_microbatches, **more)

    def weights_on(self, placement: Placement) -> tuple[float, ...] | None:
        """Bytes of weights, gradients and optimizer state per rank; None if unknown."""
        if self.weights is None or not self.counts_weights:
            return None
        return self.weights.of_ranks(placement, self.laid or None)

    @property
    def knows_weights(self) -> bool:
        """Whether ``weights_on`` knows them."""
        return self.weights is not None and self.counts_weights

    def sizes_on(self, placement: Placement) -> StageBytes | None:
        """Bytes of weights, gradients and optimizer per stage; None if unknown."""
        return None if self.weights is None else self.weights.of_stages(placement, self.laid or None)

    def halves(self, placement: Placement) -> bool:
        """Whether ``on`` divides stages that differ, for a placement with more stages than there are figures for."""
        return self.file is not None and self.file.halves(placement)

    def check(self, placement: Placement) -> None:
        """Reject a placement for which there are no costs.

        Raises:
            UserError: the model has too few layers for its stages.
        """
        self.on(placement)
        self.weights_on(placement)

    def layout(self, placement: Placement) -> tuple[int, ...]:
        """The layers per stage that a job gets, and its multi-token prediction as one more on its stage.

        Raises:
            UserError: for too few layers.
        """
        assert self.layers is not None, "only costs per layer have layouts"
        return even(placement, self.layers.num_layers) if self.division is None else self.division.parts(placement)

    def needed_layout(self, placement: Placement) -> str | None:
        """The ``--pipeline-model-parallel-layout`` that gives a job these layers per stage; None if it needs none."""
        return None if self.division is None else self.division.needed_layout(placement)

    def layout_words(self, layout: str) -> tuple[str, str]:
        """The flag, and its value, that give a job a layout."""
        return layout_words(layout, None if self.division is None else self.division.pattern)

    def evenly(self) -> Figures:
        """Return the costs of the layout that a job gets without another one; layouts by cost are made from these.

        Raises:
            UserError: without costs per layer, or for too few layers.
        """
        layers = self.layers
        if layers is None:
            raise UserError(
                "a layout by cost needs costs per layer; got those of whole ranks or stages; give --config, or a costs "
                "file with layers and parts, or with layers_per_stage"
            )
        own = replace(self, make=lambda placement: layers.on(self.layout(placement)), base=None)
        return replace(own, base=own)

    def laid_out(self, placement: Placement, layout: tuple[int, ...]) -> Figures:
        """Return ``evenly()`` with a number of layers for every stage of ``placement``, only for this placement.

        Raises:
            UserError: as ``LayerCosts.on``.
        """
        assert self.layers is not None, "evenly() checks this"
        found = self.layers.on(layout)

        def make(asked: Placement) -> tuple[PassCosts, PassMemory]:
            assert asked == placement, f"the layout is for {placement}, not for {asked}"
            return found

        return replace(self, make=make, laid=layout)

    def with_copies(self, host_ms: float | None = None, bytes_per_ms: float | None = None) -> Figures:
        """Return these figures with the time of a copy of a rank's microbatch to the host or back: one time for the
        share of every rank, or the bandwidth in bytes.

        Raises:
            UserError: for a bandwidth when memory is not in bytes.
        """
        if bytes_per_ms is not None and not self.in_bytes:
            raise UserError(
                "a bandwidth to the host needs activation memory in bytes; give --activation-memory, a costs file with "
                "activation and wgrad, or --config, or the time of a copy with --host-ms"
            )

        return self.giving(host_ms=host_ms if bytes_per_ms is None else Bandwidth(bytes_per_ms))

    def with_messages(self, message_ms: float) -> Figures:
        """Return these figures with the time in ms that a message takes from the passes of each of its ranks.

        Raises:
            UserError: for a negative or non-finite time.
        """
        refuse_huge(message_ms=message_ms)
        return self._with_transfers(message_ms=checked_figure("message_ms", message_ms))

    def with_links(self, links: Mapping[tuple[int, int], float]) -> Figures:
        """Return these figures with the times in ms of transfers between some pairs of ranks.

        Args:
            links: ms per (source rank, destination rank), as in ``PassCosts.links``; other pairs keep their times.

        Raises:
            UserError: for a negative or non-finite time.
        """
        refuse_huge(**{f"links{list(link)}": ms for link, ms in links.items()})
        checked = {link: checked_figure(f"links{list(link)}", ms) for link, ms in links.items()}
        return self._with_transfers(links={**self.given.links, **checked})

    def giving(self, **figures: Any) -> Figures:
        """Return these figures with others in place of those of the costs, see ``GivenFigures.figures``; None for those
        of the costs.
        """
        given = {name: value for name, value in {**self.given.figures, **figures}.items() if value is not None}
        return replace(self, given=replace(self.given, figures=given))

    def _with_transfers(self, **figures: Any) -> Figures:
        """The same with the times of messages, also for the layers, by which layouts are compared."""
        own = replace(self, given=replace(self.given, **figures))
        layers = None if self.layers is None else own.given.transfers(self.layers, self.num_ranks)
        return replace(own, layers=layers)

    @property
    def has_all_to_alls(self) -> bool:
        """Whether the all-to-alls of experts are known."""
        return (self.base or self).of_ranks[0].has_all_to_alls

    @property
    def microbatch(self) -> float:
        """Activation of one microbatch on the fullest rank with one stage per rank: M_B, in the unit of memory."""
        return max(self._activation)

    @property
    def peak_of_1f1b(self) -> float:
        """The largest peak of a rank under 1F1B, ``1p``, in the unit of memory: rank i keeps p-i microbatches."""
        kept = (min(self.num_microbatches, self.num_ranks - rank) for rank in range(self.num_ranks))
        return max(map(mul, kept, self._activation))

    @property
    def _activation(self) -> tuple[float, ...]:
        """Activations of a microbatch per rank with one stage per rank."""
        return (self.base or self).of_ranks[1].activation

    @property
    def in_bytes(self) -> bool:
        """Whether memory is in bytes: figures are given, and not in a coarse unit such as microbatches."""
        return self.memory_given and self.microbatch >= 2**10

    def limit(self, text: str) -> float:
        """Convert ``1p``, ``0.5p`` or ``60GiB`` to the unit of memory; ``1p`` is the peak of 1F1B with these costs.

        Raises:
            UserError: for any other form, or for bytes when memory is not in bytes.
        """
        amount, unit = parse_memory_limit(text)
        if unit == "p":
            return amount * self.peak_of_1f1b
        if not self.in_bytes:
            raise UserError(
                f"a memory limit of {text} needs activation memory in bytes; give --activation-memory, a costs file "
                "with activation and wgrad, or --config, or a limit in units of 1F1B's peak, such as 1p"
            )
        return amount * BYTES[unit]

    def rounded(self, amount: float) -> float:
        """An amount of memory as ``limit`` reads it in units of 1F1B's peak with four decimals, if that is above 0."""
        peak = self.peak_of_1f1b
        shares = round(amount / peak, 4) if peak else 0.0
        return shares * peak if shares else amount

    def show(self, amount: float) -> str:
        """Format an amount of memory, given in the unit of these figures."""
        microbatches = f"{amount / self.microbatch:.4g} microbatches"
        return f"{microbatches}, {amount / 2**30:.4g} GiB" if self.in_bytes else microbatches


class TensorFigures(NamedTuple):
    """The figures of a model that a group of GPUs divides by tensor parallelism, for as many samples, and the bytes
    that a rank sends to its group per iteration.
    """

    costs: Figures
    sent: float


@dataclass(frozen=True)
class TensorModel:
    """A model that a group of GPUs may divide by tensor parallelism, instead of being its replicas.

    Attributes:
        weights: the model, and how its layers are divided among stages.
        device: the GPU that passes are estimated for.
        num_microbatches: those of one replica.
    """

    weights: ModelWeights
    device: Device
    num_microbatches: int

    def divided(self, degree: int, bytes_per_ms: float, given: GivenFigures) -> TensorFigures:
        """Return the figures with ``degree`` GPUs that divide a layer, and send that many bytes per ms to each other.

        Raises:
            UserError: for a degree that does not divide the attention of the model.
        """
        whole, division = self.weights.model, self.weights.division
        parallel = TensorParallelModel(whole, degree)
        parallel.check()
        samples = self.num_microbatches * degree  # those of the replicas that the group replaces

        def make(placement: Placement) -> tuple[PassCosts, PassMemory]:
            laid_out = replace(whole, layers=division.on(placement))
            return replace(parallel, whole=laid_out).costs(self.device, placement, bytes_per_ms)

        own = Figures(
            len(whole.layers),
            samples,
            make,
            memory_given=True,
            message_bytes=parallel.model.message_bytes,
            weights=replace(self.weights, model=parallel.model),
            counts_weights=False,
            given=given.of_any_stages,
        )
        return TensorFigures(own, parallel.sent(samples))


def measured(
    file: CostsFile,
    num_ranks: int,
    num_microbatches: int,
    memory: Callable[[Placement], PassMemory] | None = None,
) -> Figures:
    """Make the figures of a costs file.

    Args:
        memory: memory of a microbatch, which overrides the file's; without either, memory is counted in microbatches.

    Raises:
        UserError: when the figures are for another number of ranks.
    """

    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        # Figures for half ranks cannot be divided into thirds; figures for whole ranks can be divided into any number.
        known = file.layers is not None or file.layers_per_stage or file.is_of_ranks
        fits = placement.num_stages in (num_ranks, 2 * num_ranks, file.num_stages) or known
        read_as = placement if fits else Placement.linear(num_ranks)
        costs, kept = file.on(read_as)
        if memory is not None:
            kept = memory(read_as)
        elif kept is None:
            kept = PassMemory.uniform(read_as)
        return (costs, kept) if read_as == placement else (costs.fit(placement), kept.fit(placement))

    own, (of_ranks, kept) = file.layer_costs(), file.on(Placement.linear(num_ranks))
    division = None if own is None else Division(own.num_layers, given=file.layers_per_stage, pattern=file.pattern)
    if own is not None:
        own = own.divided_as(of_ranks, kept)
    given = memory is not None or kept is not None
    return Figures(
        num_ranks,
        num_microbatches,
        on,
        given,
        notes=() if file.embedding_is_known else (_TWO_STAGES,),
        sequence=None if file.tokens is None else file.tokens.sequence,
        layers=own,
        division=division,
        file=file,
        facts=file.facts,
    )
