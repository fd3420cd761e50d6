"""Which rounds of a machine whose cores are now fast, now slow, tell what a schedule gains."""

from __future__ import annotations

from statistics import median

_EVEN = 1.1


def in_even_rounds(
    times: list[float], stock: list[float], work: list[list[float]], stocks: list[list[float]]
) -> list[float]:
    """The ratios of the rounds in which every rank was as fast as it usually is, or all of them equally slower.

    Args:
        times: of each round, in ms.
        stock: likewise, of the stock run.
        work: ms of the median passes of every rank in each round.
        stocks: likewise, of the stock run.
    """
    rounds = zip(times, stock, _slowness(work), _slowness(stocks), strict=True)
    return [time / base for time, base, own, other in rounds if max(*own, *other) <= _EVEN * min(*own, *other)]


def _slowness(work: list[list[float]]) -> list[list[float]]:
    """Each rank's work next to its own median: what a schedule or a stage costs always is no slowness."""
    usual = [median(column) for column in zip(*work, strict=True)]
    return [[ms / of_rank for ms, of_rank in zip(row, usual, strict=True)] for row in work]
