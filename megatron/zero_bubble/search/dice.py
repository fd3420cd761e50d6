"""Random numbers that are the same in every language and version: splitmix64 (Steele, Lea and Flood 2014)."""

from __future__ import annotations

_MASK = 2**64 - 1


class Dice:
    """A reproducible source of chance; csrc/planner/dice.h has its twin."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def _roll(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def uniform(self) -> float:
        """From 0 to below 1."""
        return (self._roll() >> 11) * 2.0**-53

    def below(self, count: int) -> int:
        """A whole number from 0 to below ``count``."""
        return self._roll() % count

    def shuffle(self, items: list) -> None:
        """Put ``items`` in any order."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
