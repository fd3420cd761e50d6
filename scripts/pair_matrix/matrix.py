"""The array of the matrix, and the rules of the product that exclude pairs from it."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice

from pair_matrix.array import Chosen, CoveringArray, Space
from pair_matrix.jobs import RUN_RULES, refusal
from pair_matrix.options import OPTIONS, Row

DEFAULT_JOBS = 10
REFUSALS = (
    "matrix: more than 4 ranks",
    "matrix: without a loss scale, stock stops at a gradient that is NaN",
    "matrix: a batch of one microbatch cannot grow",
    "sharded units need 2 or more stages per rank",
    "sharded units need use_distributed_optimizer=True",
    "sharded units need overlap_grad_reduce=False",
    "sharded units need num_moe_experts=None",
    "sharded units work without post-validation, offloading, vocabulary parallelism",
    "vocabulary parallelism needs a schedule of whole sequences",
    "--zero-bubble-num-slices works only with a schedule of slices",
    "--zero-bubble-slice-ends works only with a schedule of slices",
    "--use-distributed-optimizer needs --optimizer adam",
    "--num-experts with tensor parallelism needs --sequence-parallel",
    "a sequence of 16 tokens has at most 8 slices of 2 tokens each",
    *(sentence for _, sentence in RUN_RULES),
)
"""How the reasons begin for which pairs may be impossible; any other reason fails the matrix."""
_MODE = re.compile(r"^(stock|schedule|variant|run): ")


@dataclass(frozen=True)
class Array:
    """Rows, and what they cover.

    Attributes:
        pairs, covered: numbers of pairs of values, and of those that the rows have.
        refused: for each rule, the pairs that it excludes.
    """

    rows: tuple[Row, ...]
    pairs: int
    covered: int
    refused: dict[str, list[str]]


def array_of(seed: int, most: int | None) -> Array:
    """Draw the array, or its first ``most`` rows."""
    array = CoveringArray(space(), seed)
    pairs = len(array.uncovered)
    rows = tuple(islice(array.rows(), most))
    refused: dict[str, list[str]] = defaultdict(list)
    for pair, reason in sorted(array.impossible.items()):
        refused[rule_of(reason) or reason].append(_text(pair))
    return Array(rows, pairs, pairs - len(array.uncovered) - len(array.impossible), dict(refused))


def space() -> Space:
    """The options and the rule of the matrix."""
    needs = {option: {value.name: value.needs for value in values} for option, values in OPTIONS.items()}
    return Space(
        {option: [value.name for value in values] for option, values in OPTIONS.items()},
        refusal,
        lambda option, name: needs[option][name],
    )


def rule_of(reason: str) -> str | None:
    """The known rule that ``reason`` states, or None."""
    sentence = _MODE.sub("", reason)
    return next((rule for rule in REFUSALS if sentence.startswith(rule)), None)


def _text(pair: Chosen) -> str:
    return " ".join(f"{option}={name}" for option, name in pair)
