"""How to run a schedule of the table that ``zero-bubble compare`` prints, or that the playground shows."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from megatron.zero_bubble.cli.compare_table import Row
from megatron.zero_bubble.cli.layouts import BY_COST
from megatron.zero_bubble.cli.plan import add_plan
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.schedules import recipe
from megatron.zero_bubble.core.search.placements import HAS_CHUNKS, name_of
from megatron.zero_bubble.planning.candidates import Candidate
from megatron.zero_bubble.planning.plans import ADAPTING
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.source import ZB_AUTO

FILE = "plan.json"


def how_to_run(options: argparse.Namespace, winner: Candidate, row: Row) -> str:
    """Return the flags that a job needs for the row; or, where no flag says all, the command that writes its plan.

    Args:
        options: the flags of ``compare``.
    """
    tensor = [] if winner.tensor_parallel is None else [f"--tensor-model-parallel-size {winner.tensor_parallel}"]
    named = has_name(winner.question, row.vocabulary, row.needed_layout)
    flags = flags_of_name(winner.question) if named else None
    command = "" if named else f"{' '.join(_command(_chosen(options, winner, row)))} --format json > {FILE}"
    return run_text(flags, command, tensor)


def run_text(flags: Sequence[str] | None, get_file: str, more: Sequence[str] = ()) -> str:
    """Return the sentence that says how to run a plan.

    Args:
        flags: those that name its schedule; None if no flag says all that was chosen.
        get_file: what writes the plan to ``FILE``.
        more: other flags that the job needs.
    """
    if flags is None:
        run = " ".join((*more, f"--zero-bubble-schedule {FILE}"))
        return f"To run it: {get_file}, and add to the job: {run}"
    words = " ".join((*more, *flags))
    return f"To run it, add to the job: {words}" if words else "It is Megatron's own schedule: add nothing."


def has_name(question: Question, vocabulary: int | None, needed_layout: str | None) -> bool:
    """Return whether the name of a schedule is all that was chosen.

    Args:
        vocabulary, needed_layout: the algorithm of vocabulary parallelism and the layout that its plan has.
    """
    more = question.by_cost or question.pairs or question.slices or question.offload or question.shards
    return question.schedule not in (None, ZB_AUTO) and not (question.adapts or more or vocabulary or needed_layout)


def flags_of_name(question: Question) -> tuple[str, ...]:
    """Return the flags of a job for a schedule by name."""
    return tuple(_flags(question))


def _flags(question: Question) -> Iterator[str]:
    known = recipe(str(question.schedule))
    if known.name != "1f1b":
        yield f"--zero-bubble-schedule {known.name}"
    if known.shape == "interleaved":
        yield f"--zero-bubble-num-chunks {known.num_chunks(question.num_chunks[0])}"
    if known.has_units:
        yield f"--zero-bubble-unit-microbatches {question.unit}"


def _chosen(options: argparse.Namespace, winner: Candidate, row: Row) -> dict[str, Any]:
    """The flags of ``plan`` that make this row, by name: those of ``compare``, and what the row has chosen."""
    question, named = winner.question, winner.question.schedule != ZB_AUTO
    chosen = {**vars(options), "schedule": question.schedule, "placement": None, "num_chunks": None}
    if named and recipe(str(question.schedule)).shape == "interleaved":
        chosen["num_chunks"] = question.num_chunks[0]
    elif not named:
        on = cast(Placement, question.placement[0])  # a row has one placement
        chosen["placement"] = name = name_of(on)
        chosen["num_chunks"] = on.num_stages // on.num_ranks if name is not None and name in HAS_CHUNKS else None
    chosen["equal_passes"] = question.schedule in ADAPTING and not question.fits
    chosen["layout"] = BY_COST if question.by_cost else None
    chosen["vocabulary"] = row.vocabulary or ("off" if options.vocabulary else None)
    chosen["num_slices"] = row.num_slices if question.slices else None
    chosen["slice_cuts"] = options.slice_cuts if question.slices else None
    chosen["shard_weights"] = question.shards is not None
    chosen["unit_microbatches"] = question.unit or options.unit_microbatches or None
    chosen["pairs"] = question.pairs
    return chosen


def _command(chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of the command ``plan`` with these flags."""
    parser = argparse.ArgumentParser(add_help=False)
    add_plan(parser)
    yield "zero-bubble plan"
    for action in parser._actions:
        value = chosen.get(action.dest)
        if action.dest == "format" or value is None or value is False or value == action.default:
            continue
        yield action.option_strings[-1]
        if value is not True:
            yield shlex.quote(f"{value:.12g}" if isinstance(value, float) else str(value))
