"""The array of the matrix, and the rules of the product that exclude pairs from it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from megatron.zero_bubble.planning.exclusions import BALANCE, EXCLUSIONS, OPTIONS, PAIRS, SHARDS
from pair_matrix.array import Chosen, CoveringArray, Space
from pair_matrix.jobs import RUN_RULES, refusal
from pair_matrix.options import NEUTRAL, Row
from pair_matrix.options import OPTIONS as OF_JOBS

DEFAULT_JOBS = 10
REFUSALS = (
    "matrix: more than 4 ranks",
    "matrix: without a loss scale, stock stops at a gradient that is NaN",
    "matrix: a batch of one microbatch cannot grow",
    *(f"{row.one.words} and {row.other.words} exclude each other, because {row.why}" for row in EXCLUSIONS),
    *(row.rule for row in OPTIONS if row.choice in (SHARDS, BALANCE, PAIRS)),
    "sharded units need 2 or more stages per rank, of which only some are whole at a time",
    (
        "a job hides the all-to-all of experts only with 2 or more stages per rank, because megatron-core plans the "
        "layers of no other pipeline"
    ),
    *(f"{cut.schedule} works only with a schedule of slices or zb-auto" for cut in OF_JOBS["slices"] if cut.schedule),
    "--zero-bubble-post-validation inverse inverts only the update of Adam",
    (
        "--use-distributed-optimizer needs --optimizer adam, because megatron-core's distributed optimizer divides the "
        "state of no other"
    ),
    "the number of processes must be divisible by expert-tensor * expert * pipeline parallel size",
    "--num-experts with tensor parallelism needs --sequence-parallel",
    "a sequence of 16 tokens has at most 8 slices of 2 tokens each",
    *(sentence for _, sentence in RUN_RULES),
)
"""The rules for which pairs may be impossible; any other reason fails the matrix."""
_MODE = re.compile(r"^(stock|schedule|variant|run): ")


class Matrix:
    """The rows of a covering array, drawn one by one, and what they cover.

    Attributes:
        pairs: number of pairs of values.
    """

    def __init__(self, seed: int) -> None:
        self._array = CoveringArray(space(), seed)
        self.pairs = len(self._array.uncovered)

    def rows(self) -> Iterator[Row]:
        """Yield rows until all pairs are covered or refused."""
        return self._array.rows()

    @property
    def covered(self) -> int:
        """Number of pairs that the rows so far have."""
        return self.pairs - len(self._array.uncovered) - len(self._array.impossible)

    def refused(self) -> dict[str, list[str]]:
        """For each rule, or each reason that is no known rule, the pairs that it excludes, of those tried so far."""
        found: dict[str, list[str]] = defaultdict(list)
        for pair, reason in sorted(self._array.impossible.items()):
            found[rule_of(reason) or reason].append(_text(pair))
        return dict(found)


def space() -> Space:
    """The options and the rule of the matrix."""
    needs = {option: {value.name: value.needs for value in values} for option, values in OF_JOBS.items()}
    return Space(
        {option: [value.name for value in values] for option, values in OF_JOBS.items()},
        refusal,
        lambda option, name: needs[option][name],
    )


def refused_rows() -> list[Row]:
    """A row for each rule that only the ranks of a job check."""
    rows: list[Row] = []
    for values, _ in RUN_RULES:
        row = dict(NEUTRAL)
        for option, names in values.items():
            row |= {**space().needs(option, names[0]), option: names[0]}
        rows.append(row)
    return rows


def rule_of(reason: str) -> str | None:
    """The known rule that ``reason`` states, before its values and remedy, or None."""
    sentence = _MODE.sub("", reason)
    return next(
        (rule for rule in REFUSALS if sentence == rule or sentence.startswith((f"{rule};", f"{rule}, got"))), None
    )


def _text(pair: Chosen) -> str:
    return " ".join(f"{option}={name}" for option, name in pair)
