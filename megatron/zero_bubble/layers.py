"""How many layers each stage gets where they do not divide evenly: 46 layers on 16 ranks, for example."""

from __future__ import annotations

from megatron.zero_bubble.ir import Placement


def balanced_layout(placement: Placement, num_layers: int) -> str:
    """Megatron's ``--pipeline-model-parallel-layout`` that gives every rank about the same work.

    The embedding and the loss count as a layer each, as with ``--account-for-embedding-in-pipeline-split`` and
    ``--account-for-loss-in-pipeline-split``; on a V they are on one rank, which then has two layers less. What is left
    over goes to the first ranks.

    Raises:
        ValueError: when there are too few layers for every stage to hold something.
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
            raise ValueError(
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
