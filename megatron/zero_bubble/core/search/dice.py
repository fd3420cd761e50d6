"""Random numbers that are equal in every language and version: splitmix64 (Steele, Lea and Flood 2014)."""

from __future__ import annotations

_MASK = 2**64 - 1


class Dice:
    """A reproducible random number generator; csrc/planner/dice.h has the same one in C++."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def _roll(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def uniform(self) -> float:
        """A random number in [0, 1)."""
        return (self._roll() >> 11) * 2.0**-53

    def below(self, count: int) -> int:
        """A random whole number in [0, ``count``)."""
        return self._roll() % count

    def shuffle(self, items: list) -> None:
        """Put ``items`` in random order, in place."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
