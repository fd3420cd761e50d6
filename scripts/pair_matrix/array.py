"""A random covering array: rows that contain every pair of values of two options that any row can have.

Rows are built one at a time. Each begins with a pair that no row has yet, completed to a row that is not refused; then
one option after another takes the value that adds the most uncovered pairs, if the row is still not refused. So every
row is valid, and the rule is only a function of a row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

Chosen = tuple[tuple[str, str], tuple[str, str]]
"""A pair: two options with a value each, in the order of the options."""
_TRIES = 40
"""Random completions of a pair before it counts as impossible."""


class Space(NamedTuple):
    """The options and the rule.

    Attributes:
        values: names of values per option; the first is neutral.
        refusal: the reason why a row is refused, or None.
        needs: for an option and a value, values of other options that it needs.
    """

    values: Mapping[str, Sequence[str]]
    refusal: Callable[[Mapping[str, str]], str | None]
    needs: Callable[[str, str], Mapping[str, str]] = lambda _option, _value: {}


class CoveringArray:
    """Draws rows until every pair is covered or impossible.

    Attributes:
        uncovered: pairs that no row has yet.
        impossible: pairs for which no row was found, with the reason why the simplest row with them is refused.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._rng = random.Random(seed)
        self.uncovered = {
            ((one, a), (other, b))
            for one, other in combinations(space.values, 2)
            for a in space.values[one]
            for b in space.values[other]
        }
        self.impossible: dict[Chosen, str] = {}

    def rows(self) -> Iterator[dict[str, str]]:
        """Yield rows; when they end, ``uncovered`` is empty."""
        while self.uncovered:
            pair = self._rng.choice(sorted(self.uncovered))
            row = self._completed(pair)
            if row is None:
                self.uncovered.discard(pair)
                continue
            row = self._extended(row, pair)
            self.uncovered -= set(pairs_of(row))
            yield row

    def _completed(self, pair: Chosen) -> dict[str, str] | None:
        """A row with ``pair`` that is not refused: as neutral as possible, else random; None if there is none."""
        first = None
        for attempt in range(_TRIES):
            row = {option: names[0] for option, names in self._space.values.items()}
            if attempt:
                changed = self._rng.sample(sorted(row), self._rng.randint(1, min(6, len(row))))
                row |= {option: self._rng.choice(self._space.values[option]) for option in changed}
            for option, name in self._rng.sample(pair, 2):
                row |= self._space.needs(option, name)
            row |= dict(pair)
            reason = self._space.refusal(row)
            if reason is None:
                return row
            first = first or reason
        self.impossible[pair] = first or ""
        return None

    def _extended(self, row: dict[str, str], pair: Chosen) -> dict[str, str]:
        """Change options outside ``pair``, one after another, where that covers more pairs and is not refused."""
        options = [option for option in row if option not in dict(pair)]
        self._rng.shuffle(options)
        for option in options:
            names = list(self._space.values[option])
            self._rng.shuffle(names)
            gains = {name: self._gain(row, option, name) for name in names}
            for name in sorted(names, key=lambda name: -gains[name]):
                if gains[name] <= gains[row[option]]:
                    break
                changed = {**row, option: name}
                if self._space.refusal(changed) is None:
                    row = changed
                    break
        return row

    def _gain(self, row: Mapping[str, str], option: str, name: str) -> int:
        """The number of uncovered pairs of ``option=name`` with the other values of ``row``."""
        order = list(self._space.values)
        place = order.index(option)
        return sum(
            (
                ((other, row[other]), (option, name))
                if order.index(other) < place
                else ((option, name), (other, row[other]))
            )
            in self.uncovered
            for other in row
            if other != option
        )


def pairs_of(row: Mapping[str, str]) -> Iterator[Chosen]:
    """Yield the pairs of a row whose options are in the order of the space."""
    yield from combinations(row.items(), 2)
