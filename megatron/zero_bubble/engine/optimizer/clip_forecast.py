"""Forecast from recent gradient norms how likely the next one exceeds the clip threshold."""

from __future__ import annotations

import math
from collections import deque

_RECENT = 16
"""Number of norms that the forecast is made from."""

_PRIOR_DEVIATION, _PRIOR_WEIGHT = 0.2, 2.0
"""Standard deviation of a norm's logarithm before two norms are known, and the number of norms that it counts as."""


class ClipForecast:
    """Norms vary by factors, so their logarithms are taken as normally distributed, with the recent mean and deviation.

    Every rank must add the same norms in the same order, and thus gets the same forecast.
    """

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=_RECENT)

    def add(self, norm: float) -> None:
        if norm > 0 and math.isfinite(norm):  # a norm of zero says nothing about the next one
            self._logs.append(math.log(norm))

    def probability(self, clip: float) -> float:
        """Probability from 0 to 1 that the next norm exceeds ``clip``; 1 without any norm, 0 without clipping."""
        if clip <= 0:
            return 0.0
        if not self._logs:
            return 1.0
        count = len(self._logs)
        mean = math.fsum(self._logs) / count
        squares = math.fsum((log - mean) ** 2 for log in self._logs)
        variance = (squares + _PRIOR_WEIGHT * _PRIOR_DEVIATION**2) / (count - 1 + _PRIOR_WEIGHT)
        deviation = math.sqrt(variance * (1 + 1 / count))  # of the next value around a mean of ``count`` values
        return 0.5 * math.erfc((math.log(clip) - mean) / (deviation * math.sqrt(2)))
