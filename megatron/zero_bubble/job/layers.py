"""How many layers each stage gets, also where they do not divide evenly: 46 layers on 16 ranks, for example."""

from __future__ import annotations

import re

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement


def balanced_layout(placement: Placement, num_layers: int) -> str:
    """Megatron's ``--pipeline-model-parallel-layout`` that gives every rank about the same work.

    The embedding and the loss count as a layer each, as with ``--account-for-embedding-in-pipeline-split`` and
    ``--account-for-loss-in-pipeline-split``; on a V they are on one rank, which then has two layers less. What is left
    over goes to the first ranks.

    Raises:
        UserError: when there are too few layers for every stage to hold something.
    """
    p, last = placement.num_ranks, placement.num_stages - 1
    ends = {0: "E", last: "L"}
    share, more = divmod(num_layers + len(ends), p)
    counts = [0] * placement.num_stages
    for rank in range(p):
        stages = placement.stages_of(rank)
        own_ends = sum(stage in ends for stage in stages)
        items = share + (rank < more)
        if items < max(len(stages), own_ends):
            least = max(
                max(len(placement.stages_of(r)), sum(stage in ends for stage in placement.stages_of(r)))
                for r in range(p)
            )
            raise UserError(
                f"{num_layers} layers do not fill {placement.num_stages} pipeline stages with embedding and loss; use "
                f"at least {p * least - len(ends)} layers or fewer stages"
            )
        each, rest = divmod(items, len(stages))
        # Which of a rank's stages is larger alternates, so that neighbouring stages are of about the same size.
        order = stages if rank % 2 else stages[::-1]
        for position, stage in enumerate(order):
            counts[stage] = each + (position < rest) - (stage in ends)
    return "|".join(
        f"{'E' if stage == 0 else ''}{'t' * count}{'L' if stage == last else ''}" for stage, count in enumerate(counts)
    )


def stage_layers(
    placement: Placement,
    num_layers: int,
    layout: str | None = None,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
) -> tuple[int, ...]:
    """The transformer layers of every stage, in the order of the model, as megatron-core divides them.

    Args:
        layout: ``--pipeline-model-parallel-layout``, which leaves nothing to divide.
        first: layers of the first pipeline rank, where the job says how many.
        last: likewise of the last.
        embedding: whether the embedding counts as a layer.
        loss: likewise the loss.

    Raises:
        UserError: a layout of other stages or layers than the job's.
    """
    num_stages, p = placement.num_stages, placement.num_ranks
    if layout is not None:
        counts = tuple(stage.count("t") for stage in _unrolled(layout).split("|"))
        if (len(counts), sum(counts)) != (num_stages, num_layers):
            raise UserError(
                "--pipeline-model-parallel-layout must have every stage and every layer of the job, got "
                f"{len(counts)} stages and {sum(counts)} layers for {num_stages} and {num_layers}; change either"
            )
        return counts
    given = {rank: count for rank, count in {0: first, p - 1: last}.items() if count is not None}
    left = num_layers + embedding + loss - sum(given.values())
    # Megatron counts a stage as of the rank where its own interleaved schedule would have it.
    by_rank = [given[rank] if rank in given else left // (p - len(given)) for rank in range(p)]
    each = [by_rank[stage % p] // (num_stages // p) for stage in range(num_stages)]
    each[0] -= embedding
    each[-1] -= loss
    return tuple(each)


def _unrolled(layout: str) -> str:
    """``Et*2|(t|)*2L`` as ``Ett|t|t|L``."""
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(repeated, lambda match: match[1] * int(match[2]), layout.replace(",", ""))
    return layout
