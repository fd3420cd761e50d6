"""The terms of costs: what each one counts, in which unit, and what it becomes on another placement.

The values of costs (``PassCosts``, ``PassMemory``, ``VocabularyCosts``, ``LayerCosts``) are checked and converted by
this table, costs files are read and written by it, and docs/costs-json.md prints it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, Literal, NamedTuple

from megatron.zero_bubble.core.costs.units import (
    check_same_length,
    checked_figure,
    checked_share,
    checked_tokens,
    recut,
    spread,
)
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement

Per = Literal["stage", "rank", "pipeline"]
Unit = Literal["ms", "memory", "share", "tokens"]
Owner = Literal["passes", "memory", "vocabulary", "tokens"]
Figure = float | tuple[float, ...]
"""A figure as written in a file: one number, or a list with one number per stage or per rank."""

REQUIRED = "required"


class Term(NamedTuple):
    """A term of costs.

    Attributes:
        key: its key in costs files, and in their ``parts`` if it is known per layer.
        per: what it has one number for. A file may have a single one instead: for the whole share of a rank in place of
            one per stage, and the same for every rank in place of one per rank.
        unit: ``memory`` is bytes, or parts of a microbatch.
        owner: the value of costs that it is a field of: ``PassCosts``, ``PassMemory``, ``VocabularyCosts`` or
            ``SequenceTokens``.
        meaning: what it counts, for the documentation.
        missing: what a file without it means: a number in its unit, or ``REQUIRED`` if every file with a term of this
            owner has it.
        needs: keys of other owners that a file with it must have as well.
        of_layer: whether it is known per layer, as a field of ``Part``; a stage has the sum of its layers.
        weighed_by: the key of the time that a share is a part of; shares of merged stages are averaged by it, and those
            of divided stages are kept. All other figures per stage are added and divided.
        name: the field of its owner, if that is not the key.
    """

    key: str
    per: Per
    unit: Unit
    owner: Owner
    meaning: str
    missing: float | str = 0.0
    needs: tuple[str, ...] = ()
    of_layer: bool = False
    weighed_by: str = ""
    name: str = ""

    @property
    def field(self) -> str:
        return self.name or self.key

    @property
    def of_ranks(self) -> bool:
        """Whether it depends on the ranks, whatever their stages."""
        return self.per == "rank" or self.owner == "vocabulary"

    @property
    def needed(self) -> tuple[str, ...]:
        """The keys that a file with it must have as well, besides the times of F, B and W."""
        others = () if self.owner == "passes" else OF[self.owner]
        return (*(term.key for term in others if term.missing == REQUIRED and term is not self), *self.needs)

    @property
    def form(self) -> str:
        """The form of its value in a file, in words."""
        if self.per == "stage":
            return "one number or a list with one number per stage"
        if self.per == "rank":
            return "one number for every rank or a list with one number per rank"
        return "a number of tokens, 1 or more" if self.unit == "tokens" else "a number"

    def checked(self, value: object, name: str = "") -> Figure:
        """Return a value, or the list of values of all stages or ranks, in floats.

        Args:
            name: what the message calls it (default: the key).

        Raises:
            UserError: for another form, or a value outside the range of the unit.
        """
        name = name or self.key
        if self.per != "pipeline" and isinstance(value, (list, tuple)):
            return tuple(_CHECKS[self.unit](f"{name} of {self.per} {number}", one) for number, one in enumerate(value))
        return _CHECKS[self.unit](name, value)

    def on(self, figures: Mapping[str, Figure], placement: Placement) -> Figure:
        """Return the figure of a file, which has ``figures`` by key, per stage or per rank of a placement.

        Raises:
            UserError: for a list with another number of stages or ranks.
        """
        figure, stages = figures[self.key], placement.num_stages
        if self.per == "pipeline":
            return figure
        if self.per == "rank":
            return _per_rank(self.key, figure, placement.num_ranks)
        if not self.weighed_by:
            return per_stage(self.key, figure, placement)
        if isinstance(figure, float):
            return (figure,) * stages
        _check_length(self.key, figure, placement)
        ms, length = figures[self.weighed_by], len(figure)
        return averaged(recut(ms, length) if isinstance(ms, tuple) else (1.0,) * length, figure, stages)


_CHECKS = {"ms": checked_figure, "memory": checked_figure, "share": checked_share, "tokens": checked_tokens}

TERMS = (
    Term("forward_ms", "stage", "ms", "passes", "time of F of one microbatch", REQUIRED, of_layer=True),
    Term("backward_ms", "stage", "ms", "passes", "time of B of one microbatch", REQUIRED, of_layer=True),
    Term("wgrad_ms", "stage", "ms", "passes", "time of W of one microbatch", REQUIRED, of_layer=True),
    Term(
        "attention",
        "stage",
        "share",
        "passes",
        "share of F that attention takes: only [slices](slices.md) need it",
        of_layer=True,
        weighed_by="forward_ms",
        name="forward_attention",
    ),
    Term(
        "backward_attention",
        "stage",
        "share",
        "passes",
        "share of B that attention takes; with `attention` alone, it takes twice as long in B as in F",
        of_layer=True,
        weighed_by="backward_ms",
    ),
    Term(
        "recompute_ms",
        "stage",
        "ms",
        "passes",
        "time of R: of B, the part that computes activations again; only schedules in which R is a pass of its own "
        "need it",
        of_layer=True,
    ),
    Term(
        "host_ms",
        "stage",
        "ms",
        "passes",
        "time to copy what one microbatch keeps from F to B to host memory, or back: only "
        "[offloading](offload.md#planning) needs it",
        of_layer=True,
    ),
    Term(
        "gather_ms",
        "stage",
        "ms",
        "passes",
        "time to gather the weights from all replicas: only [sharded units](sharded-units.md#planning) need it",
        of_layer=True,
    ),
    Term(
        "reduce_ms", "stage", "ms", "passes", "time to reduce the gradients over the replicas, likewise", of_layer=True
    ),
    Term("comm_ms", "pipeline", "ms", "passes", "transfer between two ranks"),
    Term(
        "message_ms",
        "pipeline",
        "ms",
        "passes",
        "time that a message takes from the passes of its sender, and from those of its receiver "
        "([messages](planning.md#messages))",
    ),
    Term(
        "slice_overhead",
        "pipeline",
        "share",
        "passes",
        "share of a pass that does not depend on its tokens: every slice takes it, besides its tokens' part of the "
        "rest ([how a run measures it](slices.md#time-per-slice))",
    ),
    Term(
        "activation",
        "stage",
        "memory",
        "memory",
        "what one microbatch keeps from the start of F to the end of B; without memory figures, memory is counted in "
        "microbatches",
        REQUIRED,
        of_layer=True,
    ),
    Term(
        "wgrad",
        "stage",
        "memory",
        "memory",
        "what one microbatch keeps from the end of B to the end of W",
        REQUIRED,
        of_layer=True,
    ),
    Term(
        "history",
        "stage",
        "memory",
        "memory",
        "the keys and values of one microbatch: only slices need it",
        of_layer=True,
    ),
    Term(
        "recomputed_activation",
        "stage",
        "memory",
        "memory",
        "what one microbatch keeps from R to the end of B in addition to `activation`",
        of_layer=True,
        name="rebuilt",
    ),
    Term(
        "states",
        "stage",
        "memory",
        "memory",
        "the states that recurrent layers hand from one slice of a microbatch to the next: only slices need it",
        of_layer=True,
    ),
    Term(
        "captured",
        "stage",
        "memory",
        "memory",
        "of `activation` and of `wgrad`, what is in memory of [CUDA graphs](cuda-graphs.md), which keep it "
        "after W for another microbatch",
        of_layer=True,
    ),
    Term(
        "output_ms",
        "rank",
        "ms",
        "vocabulary",
        "time of S, a pass of a rank's shard of the output layer: only [vocabulary parallelism](vocabulary.md) needs "
        "it, and the times of F, B and W are then without the output layer and the embedding",
        REQUIRED,
    ),
    Term("output_wgrad_ms", "rank", "ms", "vocabulary", "time of T, likewise", REQUIRED),
    Term("embedding_ms", "rank", "ms", "vocabulary", "time of I, a pass of a rank's shard of the embedding"),
    Term("embedding_wgrad_ms", "rank", "ms", "vocabulary", "time of J, likewise"),
    Term(
        "collective_ms",
        "pipeline",
        "ms",
        "vocabulary",
        "time that a collective between all ranks takes in addition to `comm_ms`",
    ),
    Term(
        "logits",
        "rank",
        "memory",
        "memory",
        "what one microbatch keeps from S to T",
        needs=("output_ms", "output_wgrad_ms"),
    ),
    Term(
        "sequence_length",
        "pipeline",
        "tokens",
        "tokens",
        "tokens of a sequence: `--num-slices auto` needs it",
        REQUIRED,
        name="sequence",
    ),
    Term(
        "least_slice_tokens",
        "pipeline",
        "tokens",
        "tokens",
        "fewest tokens per slice for `--num-slices auto` ([how a run measures it](slices.md#fewest-tokens-per-slice))",
        1024.0,
        name="least",
    ),
)
BY_KEY = {term.key: term for term in TERMS}
OF: dict[Owner, tuple[Term, ...]] = {
    owner: tuple(term for term in TERMS if term.owner == owner)
    for owner in ("passes", "memory", "vocabulary", "tokens")
}
"""The terms of every value of costs."""
OF_LAYER = tuple(term for term in TERMS if term.of_layer)
SHARED = tuple(term.field for term in OF["passes"] if term.per == "pipeline")
"""The fields of ``PassCosts`` that all stages share; ``LayerCosts`` has them too."""
TIMES = ("forward_ms", "backward_ms", "wgrad_ms")
MEMORY = ("activation", "wgrad")


def settle(costs: object, owner: Owner) -> None:
    """Check the fields of a frozen value, convert them to floats, and give those that are missing one 0 per stage.

    Raises:
        UserError: for an invalid figure, or when the lists differ in length.
    """
    terms = OF[owner]
    per, number = terms[0].per, len(getattr(costs, terms[0].field))
    for term in terms:
        value = getattr(costs, term.field)
        if term.per == per and not value and term.missing != REQUIRED:
            value = (0.0,) * number
        object.__setattr__(costs, term.field, term.checked(value, term.field))
    check_same_length(costs, [term.field for term in terms if term.per == per])


def fitted(costs: object, owner: Owner, num_stages: int) -> dict[str, Any]:
    """Return the fields of a value that are per stage for another number of stages of the same model.

    Raises:
        UserError: when neither number of stages is a multiple of the other.
    """
    found = {}
    for term in OF[owner]:
        if term.per == "stage":
            figures = getattr(costs, term.field)
            if term.weighed_by:
                found[term.field] = averaged(getattr(costs, term.weighed_by), figures, num_stages)
            else:
                found[term.field] = recut(figures, num_stages)
    return found


def averaged(times: Sequence[float], shares: Sequence[float], num_stages: int) -> tuple[float, ...]:
    """Convert shares of ``times`` to another number of stages: merged stages get the mean, weighted by time."""
    parts, whole = recut(tuple(map(mul, times, shares)), num_stages), recut(tuple(times), num_stages)
    return tuple(min(1.0, part / all_) if all_ else 0.0 for part, all_ in zip(parts, whole, strict=True))


def per_stage(name: str, figure: Figure, placement: Placement) -> tuple[float, ...]:
    """Convert a figure that is added up over stages to those of a placement.

    Raises:
        UserError: for a list with another number of stages.
    """
    if isinstance(figure, float):
        return spread(placement, figure)
    _check_length(name, figure, placement)
    return recut(figure, placement.num_stages)


def _check_length(name: str, figures: Sequence[float], placement: Placement) -> None:
    if len(figures) != placement.num_stages and (not figures or len(figures) % placement.num_ranks):
        raise UserError(
            f"{name} must have one figure for each of the {placement.num_stages} stages; got {len(figures)}; "
            "give as many, or a single number for the whole share of each rank"
        )


def _per_rank(name: str, figure: Figure, num_ranks: int) -> tuple[float, ...]:
    figures = figure if isinstance(figure, tuple) else (figure,) * num_ranks
    if len(figures) != num_ranks:
        raise UserError(
            f"{name} must have one figure for each of the {num_ranks} ranks; got {len(figures)}; give as many, or a "
            "single number for every rank"
        )
    return figures
