"""Choose how to cut sequences: a given number of slices and given cuts, or those with the shortest schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from megatron.zero_bubble.core.analysis.score import Goal
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.cuts import balanced, default_cuts
from megatron.zero_bubble.core.costs.units import checked_share
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import WHOLE, Placement, Schedule, Slices
from megatron.zero_bubble.core.ir.sizes import check_size
from megatron.zero_bubble.core.schedules import SCHEDULES
from megatron.zero_bubble.core.schedules.recipe import Recipe
from megatron.zero_bubble.core.search.auto import zb_auto
from megatron.zero_bubble.core.search.placements import Placements, placements
from megatron.zero_bubble.core.search.sliced import sliced_auto
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import auto
from megatron.zero_bubble.planning.setup import LEAST_TOKENS, Cuts

_MOST_SLICES = 16
"""The most slices that are tried if the length of a sequence is unknown."""
_LITTLE = 0.01
"""Effort of the search for a first schedule, which all ranks of a job do."""


def with_candidates(cuts: Cuts, costs: Figures) -> Cuts:
    """The cuts with the slices to choose from, the fewest first; only one if neither number nor places are open.

    Without places, they are the better of even and balanced cuts if the number is to be chosen, else balanced cuts if
    attention takes much of the time (``default_cuts``).

    Raises:
        UserError: for more slices than tokens, or a minimum of tokens without a known sequence length.
    """
    return cuts if cuts.among else replace(cuts, among=_candidates(cuts, costs))


def least_tokens(costs: Figures) -> int:
    """The fewest tokens of a slice: as the run of the costs has measured, else the default."""
    measured = None if costs.file is None or costs.file.tokens is None else costs.file.tokens.least
    return measured or LEAST_TOKENS


def _candidates(cuts: Cuts, costs: Figures) -> tuple[Slices, ...]:
    on = costs.of_ranks[0]
    if isinstance(cuts.places, tuple):
        found = [_between(cuts.places)]
    elif isinstance(cuts.number, int):
        make = {"even": lambda _, number: Slices.even(number), "balanced": balanced}.get(str(cuts.places), default_cuts)
        found = [make(on, cuts.number)]
    else:
        least = cuts.least_tokens or least_tokens(costs)
        found = _powers_of_two(cuts, costs, least)
        by_time = [] if cuts.places == "even" else [balanced(on, len(slices)) for slices in found]
        found = sorted({*(found if cuts.places != "balanced" else ()), *by_time}, key=_order)
        found = [slices for slices in found if _is_long_enough(slices, costs, least)]
    if costs.sequence is not None:
        for slices in found:
            slices.in_tokens(costs.sequence)
    return tuple(found)


def _between(ends: tuple[float, ...]) -> Slices:
    """The slices with these ends, as numbers of tokens or as shares of the sequence."""
    if ends[-1] != 1:
        return Slices.of_tokens(tuple(map(int, ends)))
    return Slices(tuple(end - start for start, end in pairwise((0.0, *ends))))


def _powers_of_two(cuts: Cuts, costs: Figures, least: int) -> list[Slices]:
    if costs.sequence is None and cuts.least_tokens is not None:
        raise UserError(
            f"a minimum of {cuts.least_tokens} tokens per slice needs the length of a sequence, which only "
            "--config or a costs file with sequence_length gives; leave out --min-slice-tokens, or give the number "
            "of slices"
        )
    most = _MOST_SLICES if costs.sequence is None else max(1, costs.sequence // least)
    return [Slices.even(2**power) for power in range(most.bit_length())]


def _is_long_enough(slices: Slices, costs: Figures, least: int) -> bool:
    if costs.sequence is None or len(slices) == 1:
        return True
    return min(slices.shares) * costs.sequence >= least - 0.5


def _order(slices: Slices) -> tuple[int, bool, tuple[float, ...]]:
    return len(slices), not slices.are_even, slices.shares


def search(
    costs: Figures,
    placement: Placements,
    goal: Goal,
    cuts: Cuts | None = None,
    effort: float = 1.0,
    ends: bool = False,
) -> Schedule:
    """``auto``, where sequences may be cut: schedules of several slices have a search of their own, without ``effort``
    and ``ends``, and are not longer than the known ones.
    """
    if cuts is None or cuts.are_whole:
        return auto(costs, placement, goal, effort, ends)
    slices, choices = cuts.among[0], placements(placement, costs.num_ranks)
    chunks = max(on.num_stages for on in choices) // costs.num_ranks
    check_size(costs.num_ranks, costs.num_microbatches, chunks, len(slices))
    known = (name for name, recipe in SCHEDULES.items() if recipe.sliced and recipe.shape == "linear")
    made = [costs.build(name, num_slices=slices) for name in known]
    return sliced_auto(costs.on, choices, costs.num_microbatches, slices, goal, made)


def search_equal(on: Placement, cuts: Cuts, num_microbatches: int, limit: float = math.inf) -> Schedule:
    """Search for a schedule for equal passes, within the peak of 1F1B; of slices, within that of ``seq-zb-h1`` and one
    more slice; in any case within a limit in microbatches of a rank.
    """
    costs, memory, ranks = PassCosts.uniform(on, 1.0, 1.0, 1.0), PassMemory.uniform(on), on.num_ranks
    if not cuts.are_whole:
        slices = cuts.among[0]
        limit = min(limit, 1 + ranks * max(slices.shares))
        return sliced_auto(lambda _: (costs, memory), [on], num_microbatches, slices, Goal(limit=limit))
    limit = min(limit, float(ranks))
    return zb_auto(costs, memory, ranks, num_microbatches, limit, placement=(on,), objective="makespan", effort=_LITTLE)


def cutting(make: Callable[..., Schedule], cuts: Cuts | None) -> Callable[..., Schedule]:
    """What makes the schedules of a name with the cuts of a run."""
    return partial(make, num_slices=slices_of(cuts))


def cuts_of(cuts: Cuts | None, recipe: Recipe | None = None) -> Cuts:
    """The cuts of a run, of which none are left to choose.

    Args:
        recipe: the schedule; None for a search, which leaves sequences whole by default.

    Raises:
        UserError: as ``slices_of``, or cuts of a schedule that does not cut sequences.
    """
    slices = slices_of(cuts)
    return Cuts(among=(slices or WHOLE if recipe is None else recipe.slices(slices),))


def slices_of(cuts: Cuts | None) -> Slices | None:
    """The slices of a run; None for the schedule's default.

    Raises:
        UserError: fewer than one slice, ends that do not increase, or a share that is not between 0 and 1.
    """
    if cuts is None or cuts.among:
        return None if cuts is None else cuts.among[0]
    if isinstance(cuts.places, tuple):
        return Slices.of_tokens(tuple(map(int, cuts.places)))
    assert isinstance(cuts.number, int) and cuts.places != "balanced", "a run has numbers to cut by"
    if not isinstance(cuts.places, float):
        return Slices.even(cuts.number)
    share = checked_share("attention_share", cuts.places)
    # A product of matrices takes equally long in F, B and W, and attention twice as long in B as in F.
    costs = PassCosts.uniform(Placement.linear(1), 1.0, 1.0 + share, 1.0 - share, attention=share)
    return balanced(costs, cuts.number)


def check_cuts(cuts: Cuts | None, given: Cuts | None, job: Any) -> None:
    """Check that the job's sequences can be cut.

    Args:
        cuts: those that run; None for whole sequences.
        given: those that the user gave.
        job: the job's flags.

    Raises:
        UserError: ends that belong to sequences of another length, or sequences with too few tokens.
    """
    if cuts is None:
        return
    places, length = None if given is None else given.places, job.seq_length
    ends = tuple(map(int, places)) if isinstance(places, tuple) else None
    if ends is not None and ends[-1] != length:
        raise UserError(
            f"the last end of the slices must be the length of the sequences, --seq-length {length}; got "
            f"--zero-bubble-slices {','.join(map(str, ends))}; give {length} as the last end"
        )
    multiple = job.tensor_model_parallel_size if job.sequence_parallel else 1
    tokens = cuts.among[0].in_tokens(length, multiple)
    if ends is not None and tokens != ends:
        raise UserError(
            "with sequence parallelism, every slice must end at a multiple of the tensor-parallel size "
            f"{multiple}; got --zero-bubble-slices {','.join(map(str, ends))}; give for example "
            f"{','.join(map(str, tokens))}"
        )
