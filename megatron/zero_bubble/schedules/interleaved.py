"""Interleaved 1F1B, Megatron's virtual pipeline: the baseline that has to be beaten, besides plain 1F1B.

Stock megatron-core runs it by itself, so it is compared with, not registered. Rank i holds stages i, i+p, i+2p, and
units of p microbatches go through one chunk after the other (Narayanan et al., arXiv 2104.04473). With two chunks:

rank 0 |0F0 0F1 2F0 2F1 0F2 ....2BW0--- 0F3 2BW1--- 2F2 0BW0--- 2F3 0BW1--- ....2BW2--- ....2BW3--- 0BW2--- 0BW3--- |
rank 1 |....1F0 1F1 3F0 3BW0--- 3F1 3BW1--- 1F2 1BW0--- 1F3 1BW1--- 3F2 3BW2--- 3F3 3BW3--- 1BW2--- 1BW3--- ........|
"""

from megatron.zero_bubble.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.schedules.letters import forward_backward


def build(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Every rank warms up with 2(p-1-i) passes and a full unit of each chunk but the last.

    Raises:
        ValueError: unless the microbatches are a multiple of the ranks.
    """
    if num_microbatches % num_ranks:
        raise ValueError(
            f"interleaved 1F1B needs microbatches in multiples of the {num_ranks} ranks; got {num_microbatches}"
        )
    placement = Placement.interleaved(num_ranks, num_chunks)
    order = tuple(_row(rank, num_ranks, num_microbatches, num_chunks) for rank in range(num_ranks))
    return Schedule(f"1f1b-interleaved-{num_chunks}", placement, num_microbatches, order)


def _row(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[Pass, ...]:
    def numbered(kind: Kind, n: int) -> Pass:
        """The n-th F or BW of the rank: units of p microbatches, chunks in turn, the last first on the way back."""
        unit, within = divmod(n, num_ranks * num_chunks)
        turn, microbatch = divmod(within, num_ranks)
        chunk = turn if kind is Kind.F else num_chunks - 1 - turn
        return Pass(chunk * num_ranks + rank, kind, unit * num_ranks + microbatch)

    warmup = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks
    counts = {"F": 0, "B": 0}
    row = []
    for letter in forward_backward(num_microbatches * num_chunks, warmup):
        row.append(numbered(Kind.F if letter == "F" else Kind.BW, counts[letter]))
        counts[letter] += 1
    return tuple(row)
