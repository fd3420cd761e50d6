"""What the flags of ``plan`` and ``compare`` choose besides an order of passes: slices, vocabulary parallelism,
offloading and sharded units. Both commands see only what is here.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron.zero_bubble.cli.compared_row import Columns
from megatron.zero_bubble.cli.offload import MovedColumns, add_offload, offload_summary, offloads, with_copies
from megatron.zero_bubble.cli.shards import UnitColumns, add_shards, shard_summary, shards, with_shards
from megatron.zero_bubble.cli.slices import check_cuts
from megatron.zero_bubble.cli.vocabulary import add_vocabulary, divided_of, with_vocabulary
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.planning.answer import Answer
from megatron.zero_bubble.planning.candidates import Candidate
from megatron.zero_bubble.planning.codecs import setup_of_flags, speller
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offload import OffloadPlan
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Setup
from megatron.zero_bubble.planning.shards import Replicas, ShardPlan
from megatron.zero_bubble.planning.values import PLAN_ROWS, placed
from megatron.zero_bubble.planning.vocabulary import VocabularyChoice, are_divided


def add_choices(verb: argparse.ArgumentParser) -> None:
    """Add the flags but those of the table of decisions."""
    add_vocabulary(verb)
    add_offload(verb)
    add_shards(verb)


def check_choices(options: argparse.Namespace) -> None:
    """Check the flags, each alone.

    Raises:
        UserError: for flags of another form, or without effect.
    """
    check_cuts(options)
    shards(options)
    offloads(options)


def with_choices(options: argparse.Namespace, costs: Figures) -> Figures:
    """Return the costs with the times that the flags give.

    Raises:
        UserError: for flags that contradict each other or the costs.
    """
    costs = with_shards(options, costs) if options.shard_weights else costs
    costs = with_vocabulary(options, costs)
    return with_copies(options, costs) if offloads(options) else costs


def setup_of(
    options: argparse.Namespace, costs: Figures, file: Schedule | None = None, default: VocabularyChoice | None = None
) -> Setup:
    """Return the setup that the flags give.

    Args:
        file: the schedule of a file, whose passes decide.
        default: the choice of vocabulary parallelism if neither a file nor a flag makes one.

    Raises:
        UserError: for flags that contradict each other, the costs or the file.
    """
    divided = divided_of(options, costs, file, default)
    setup = setup_of_flags(vars(options), vocabulary=divided and divided.algorithm)
    return setup if offloads(options) else replace(setup, offload=None)


def added_text(made: Answer) -> str:
    """Format the figures of offloading and of sharded units."""
    over, moved, units = made.question.replicas, made.part(OffloadPlan), made.part(ShardPlan)
    text = "" if moved is None else offload_summary(moved, made.costs)
    return text if units is None or over is None else text + shard_summary(over, units, made.costs)


def columns_of(made: Answer, row: Candidate, over: Replicas | None) -> tuple[Columns, ...]:
    """The figures of offloading, and of what replicas send and hold, in the table of ``compare``.

    Args:
        over: the replicas of the row's plan; None if they are not compared.
    """
    return MovedColumns.of(made), UnitColumns.of(made, row, over)


def choices_of(options: argparse.Namespace) -> RunOptions:
    """What the flags of ``plan`` choose."""
    values = {row.name: getattr(options, row.plan.option, None) for row in PLAN_ROWS if row.plan is not None}
    setup, _ = placed(values, speller("plan"), of_plan=True)
    if options.output_ms is not None:
        setup = _dividing(setup)
    lengths = getattr(options, "lengths", None)  # which compare does not have
    return RunOptions(setup, lengths=None if lengths is None else ("lengths", lengths))


def with_files(run: RunOptions, costs: Figures, file: Schedule | None = None) -> RunOptions:
    """The same with what the costs and a schedule file choose."""
    setup = run.setup
    if are_divided(costs):
        setup = _dividing(setup)
    if file is not None:
        decided = Setup.of(file)
        setup = replace(setup, cuts=setup.running(decided).cuts, vocabulary=decided.vocabulary or setup.vocabulary)
    return replace(run, setup=setup)


def common_choices(options: argparse.Namespace, costs: Figures | None = None) -> RunOptions:
    """What all rows of ``compare`` have in common.

    Schedules with and without the passes of the vocabulary are rows of their own for ``--vocabulary auto``, unless the
    costs are without the vocabulary; not so with sharded units, which have none.
    """
    run = choices_of(options)
    if costs is not None and are_divided(costs):
        return with_files(run, costs)
    if options.vocabulary == "auto" and not options.shard_weights:
        return replace(run, setup=replace(run.setup, vocabulary=None))
    return run


def _dividing(setup: Setup) -> Setup:
    """The same with the default where the times of the vocabulary's passes are known."""
    return setup if setup.vocabulary is not None else replace(setup, vocabulary=Divided("auto"))
