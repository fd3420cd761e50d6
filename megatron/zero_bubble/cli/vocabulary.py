"""Flags for vocabulary parallelism."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from megatron.zero_bubble.cli.compared_row import ComparedRow
from megatron.zero_bubble.cli.layouts import compared
from megatron.zero_bubble.core.analysis.score import length_ms
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs.units import refuse_huge
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import UserError, as_flag
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.ir.vocabulary import Divided, algorithm_of
from megatron.zero_bubble.planning.codecs import setup_of_flags
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.vocabulary import VocabularyChoice, divided_by

_TIMES = ("output_ms", "output_wgrad_ms", "embedding_ms", "embedding_wgrad_ms", "collective_ms")


def add_vocabulary(verb: argparse.ArgumentParser) -> None:
    """Add the flags."""
    for flag, metavar, text in (
        ("--output-ms", "S", ("time of S, the forward of a rank's shard of the output layer, in ms; the times of F, B "
         "and W are then without the output layer and the embedding")),
        ("--output-wgrad-ms", "T", "time of T, the weight gradient of a rank's shard of the output layer, in ms"),
        ("--embedding-ms", "I", "time of I, the look-up in a rank's shard of the embedding, in ms (default: 0)"),
        ("--embedding-wgrad-ms", "J", "time of J, the gradient of a rank's shard of the embedding, in ms (default: 0)"),
        ("--collective-ms", "C", ("time that a collective of all ranks takes in addition to --comm-ms, in ms "
         "(default: 0)")),
    ):  # fmt: skip
        verb.add_argument(flag, type=float, metavar=metavar, help=text)


class GainOverLayouts(NamedTuple):
    """What a divided vocabulary gains over a layout by cost, as JSON and as text."""

    content: dict[str, float | None]
    lines: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[ComparedRow], objective: Metric) -> GainOverLayouts:
        """Compare the first row within the limit with a divided vocabulary and the first with a layout by cost."""
        listed = [row for row in rows if row.within_limit]
        whole = next((row for row in listed if row.work.vocabulary is None and row.layout is not None), None)
        divided = next((row for row in listed if row.work.vocabulary is not None), None)
        of_whole, of_divided = (None if row is None else length_ms(row, objective) for row in (whole, divided))
        gain = 1 - of_divided / of_whole if of_whole and of_divided is not None else None
        lines = []
        if whole is not None:
            lines.append(f"best layout: '{whole.layout}' with {whole.schedule}, {of_whole:.3f} ms")
        if divided is not None and gain is not None:
            of = f"vocabulary parallelism, {divided.schedule}, {of_divided:.3f} ms"
            lines.append(f"{of}: {compared(gain)} the best layout")
        return cls({"gain_of_vocabulary": gain}, tuple(lines))


def asks_to_divide(options: argparse.Namespace) -> bool:
    """Whether the flags say something about vocabulary parallelism."""
    return options.vocabulary is not None


def divided_of(
    options: argparse.Namespace, costs: Figures, file: Schedule | None = None, default: VocabularyChoice | None = None
) -> Divided | None:
    """Return how the flags divide the vocabulary; ``file`` is the schedule of a file, whose passes decide.

    ``default`` is the choice if there is neither a file nor ``--vocabulary``.

    Raises:
        UserError: for flags that contradict each other, the costs or the file.
    """
    choice: VocabularyChoice | None = options.vocabulary or default
    own = None if file is None else algorithm_of(file)
    if own is not None:
        if choice not in (None, str(own)):
            raise UserError(
                f"--vocabulary must be that of the schedule file, {own}; got {choice}; leave out --vocabulary"
            )
        choice = "1" if own == 1 else "2"
    asked = setup_of_flags(vars(options), vocabulary="auto").vocabulary
    assert asked is not None, "it is divided, whatever the algorithm"
    return divided_by(costs, choice, asked)


def with_vocabulary(options: argparse.Namespace, costs: Figures) -> Figures:
    """Return the costs with the times of the passes of the vocabulary that the flags give.

    Raises:
        UserError: for flags that contradict each other, or if times are missing.
    """
    times = {name: getattr(options, name) for name in _TIMES if getattr(options, name) is not None}
    if not times:
        return costs
    flags = list(map(as_flag, times))
    for name in ("costs", "config"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} gives the times of all passes; leave out {flags[0]}")
    for name in ("output_ms", "output_wgrad_ms"):
        if name not in times:
            raise UserError(f"{flags[0]} needs {as_flag(name)} as well; it is missing")
    refuse_huge(**dict(zip(flags, times.values(), strict=True)))
    return costs.giving(vocabulary=VocabularyCosts.uniform(costs.num_ranks, **times))
