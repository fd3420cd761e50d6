"""What the flags of ``plan`` and ``compare`` and their files choose, for the table of exclusions."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.ir.vocabulary import Divided, algorithm_of
from megatron.zero_bubble.planning.codecs import speller
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Cuts, Setup
from megatron.zero_bubble.planning.values import PLAN_ROWS, placed
from megatron.zero_bubble.planning.vocabulary import are_divided


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
        algorithm = algorithm_of(file)
        divided = setup.vocabulary if algorithm is None else Divided(algorithm)
        setup = replace(setup, cuts=Cuts(file.num_slices), vocabulary=divided)
    return replace(run, setup=setup)


def common_choices(options: argparse.Namespace) -> RunOptions:
    """What all rows of ``compare`` have in common.

    Schedules with and without the passes of the vocabulary are rows of their own for ``--vocabulary auto``; not so with
    sharded units, which have none.
    """
    run = choices_of(options)
    if options.vocabulary == "auto" and not options.shard_weights:
        return replace(run, setup=replace(run.setup, vocabulary=None))
    return run


def _dividing(setup: Setup) -> Setup:
    """The same with the default where the times of the vocabulary's passes are known."""
    return setup if setup.vocabulary is not None else replace(setup, vocabulary=Divided("auto"))
