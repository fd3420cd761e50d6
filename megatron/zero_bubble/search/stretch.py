"""Make rows for many microbatches from rows for few, by repeating their middle.

A good schedule is a warm-up, a steady state that repeats every few microbatches, and a cool-down. So the search works
on as few microbatches as show all three, and what it finds is repeated: microbatches from the middle on are copied,
later by a period each, and all passes of a rank are put in the order of their times.
"""

from __future__ import annotations

from megatron.zero_bubble.search.problem import Problem, Rows, W
from megatron.zero_bubble.search.timeline import times


def stretch(problem: Problem, full: Rows, num_microbatches: int, period: int) -> Rows:
    """Rows of F and B for ``num_microbatches``, from rows with W's of ``problem``, which has fewer.

    Args:
        problem: what ``full`` is for.
        full: rows with W's.
        num_microbatches: more than the problem's.
        period: the steady state is taken to repeat every ``period`` microbatches.
    """
    starts, number, places = times(problem, full)
    added = num_microbatches - problem.num_microbatches
    middle = max(0, (problem.num_microbatches - period) // 2)
    first = [starts[0][place] for place in places[0]]  # forwards of the first stage
    last = min(middle + period, len(first) - 1)
    shift = (first[last] - first[middle]) / max(1, last - middle)
    rows = []
    for rank, row in enumerate(full):
        moments = []
        for place, (code, n, start) in enumerate(zip(row, number[rank], starts[rank], strict=True)):
            if code % 3 == W:
                continue
            if n < middle + period:
                moments.append((start, place, code))
            if middle <= n < middle + period:
                for copy in range(n - middle + period, added + period, period):
                    moments.append((start + shift * (copy - n + middle), place, code))
            if n >= middle + period:
                moments.append((start + shift * added, place, code))
        moments.sort()
        rows.append([code for _, _, code in moments])
    return rows
