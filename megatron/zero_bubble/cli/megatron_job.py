"""Check the flags of a job that runs Megatron-LM's script, without starting it, in the order of the run."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from megatron.zero_bubble.core.errors import Refusal, UserError, attempted
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.integration.megatron_lm import checks
from megatron.zero_bubble.integration.megatron_lm.batches import (
    in_training,
    job_batches,
    last_iteration,
    num_microbatches,
)
from megatron.zero_bubble.integration.megatron_lm.fork_flags import modernize
from megatron.zero_bubble.planning.codecs import parse
from megatron.zero_bubble.planning.job.effects import Job
from megatron.zero_bubble.planning.job.flags import as_given, given_in
from megatron.zero_bubble.planning.job.overlaps import enabled_overlaps, switched_off
from megatron.zero_bubble.planning.job.pattern import pattern_of, set_layout
from megatron.zero_bubble.planning.job.planned import other_options, run_of
from megatron.zero_bubble.planning.job.rules import check_costs_file, check_job
from megatron.zero_bubble.planning.job.sequence_parallel import without_sequence_parallelism
from megatron.zero_bubble.planning.setup import Setup
from megatron.zero_bubble.planning.values import values_of

_SIMILAR = 0.85
"""Similarity from which an unknown flag of a job that cannot run is a known one with a mistake."""


class MegatronJob(NamedTuple):
    """A checked job.

    Attributes:
        args: the flags of Megatron that this package knows, with the placement and the batch sizes that follow from
            them, and ``run``, what our flags ask for.
        unread: the flags that only Megatron-LM knows.
        replaced: one sentence per flag that the launcher (those of the authors' fork) or Megatron replaces or drops.
    """

    args: argparse.Namespace
    unread: tuple[str, ...]
    replaced: tuple[str, ...]


@dataclass(frozen=True)
class ParsedJob:
    """The flags of a job, parsed once, with which it and its changes are checked.

    Attributes:
        arguments: the flags as they were parsed, those of the authors' fork replaced.
        given: the values of our flags, by the names of decisions.
        args, unread, replaced: as in ``MegatronJob``, before any check.
        world_size: processes of the job.
        node_size: processes per node.
    """

    arguments: tuple[str, ...]
    given: Mapping[str, Any]
    args: argparse.Namespace
    unread: tuple[str, ...]
    replaced: tuple[str, ...]
    world_size: int
    node_size: int

    @cached_property
    def setup(self) -> Setup:
        """What it runs, of a job that has been checked."""
        own, pattern = parse(self.arguments), pattern_of(self.args)
        return own if pattern is None else replace(own, layout=pattern.layout)

    def checked(self) -> MegatronJob:
        """Check the job as it is.

        Raises:
            UserError: the error that a run with these flags ends with.
        """
        try:
            return _checked(copy.copy(self.args), self.given, self)
        except UserError as error:
            if not (meant := suspects(self.unread)):
                raise
            raise UserError(f"{error}{meant}", error.everywhere, error.remedy) from error

    def changed(self, setup: Setup, adds: Sequence[str], drops: Sequence[str]) -> MegatronJob:
        """Check the job with another setup.

        Args:
            adds: flags of Megatron's own to add, with their values.
            drops: flags of Megatron's own to leave out.

        Raises:
            UserError: the error that a run with these flags ends with.
        """
        from megatron.zero_bubble.planning.job.arguments.parser import with_megatron_flags

        args = with_megatron_flags(self.args, adds, drops)
        set_layout(args, setup.layout)
        return _checked(args, values_of(setup) | other_options(self.given), self, setup.plan)

    def refused(self, setup: Setup, adds: Sequence[str], drops: Sequence[str]) -> Refusal | None:
        """Return why the changed job would be refused; None if it would run."""
        job = attempted(partial(self.changed, setup, adds, drops))
        return job if isinstance(job, Refusal) else None


def suspects(unread: Sequence[str]) -> str:
    """Return which flags that are not known here may be known ones, to end an error with; empty if none may."""
    from megatron.zero_bubble.planning.job.arguments.parser import misspelt

    known = misspelt(unread, _SIMILAR)
    return "".join(f"; {flag} is no flag that is known here, did you mean {meant}?" for flag, meant in known)


def parsed_megatron_job(argv: Sequence[str], world_size: int, node_size: int) -> ParsedJob:
    """Parse the flags of the script.

    Args:
        world_size: processes of the job.
        node_size: processes per node.

    Raises:
        UserError: flags that cannot be parsed.
    """
    from megatron.zero_bubble.planning.job.arguments.parser import parse_megatron

    arguments, replaced = modernize(argv)
    given, others = given_in(arguments)
    args, unread = parse_megatron(others)
    return ParsedJob(tuple(arguments), given, args, unread, tuple(replaced), world_size, node_size)


def checked_megatron_job(argv: Sequence[str], world_size: int, node_size: int) -> MegatronJob:
    """Parse and check the flags of the script; see ``parsed_megatron_job``.

    Raises:
        UserError: the error that a run with these flags ends with.
    """
    return parsed_megatron_job(argv, world_size, node_size).checked()


def _checked(
    args: argparse.Namespace, given: Mapping[str, Any], job: ParsedJob, plan: PlanFile | None = None
) -> MegatronJob:
    """Check flags, in the order of a run.

    Args:
        plan: the content of the schedule file, if it is known.
    """
    from megatron.zero_bubble.planning.job.arguments.checks import check_model, check_sizes

    world_size, node_size = job.world_size, job.node_size
    args.run = run_of(given, as_given, plan)
    checks.check_format(args.run, args.yaml_cfg)
    check_job(Job(args.run, under_launcher=True, train_iters=last_iteration(args)))
    if (pattern := pattern_of(args)) is not None:
        args.num_layers, args.mtp_num_layers = len(pattern.layers), len(pattern.predictions) or args.mtp_num_layers
    replaced = [*job.replaced, *without_sequence_parallelism(args)]
    check_sizes(args, world_size)
    replaced += _place(args)
    if args.run.has_schedule and (names := enabled_overlaps(args)):
        replaced.append(switched_off(names))
    _read_pattern(args)
    args.batch_sizes = job_batches(args)
    check_model(args, world_size)
    if args.source is not None:
        checks.check(args, args.run, args.source, num_microbatches(args))
        checks.check_offload(args, args.zero_bubble, args.source, max(in_training(args)), node_size)
    return MegatronJob(args, job.unread, tuple(replaced))


def _read_pattern(args: argparse.Namespace) -> None:
    """Convert the pattern of a hybrid model, where it divides the layers, to a layout."""
    pattern = pattern_of(args)
    if pattern is not None and pattern.layout is not None:
        args.pipeline_model_parallel_layout = pattern.layout


def _place(args: argparse.Namespace) -> list[str]:
    """Set the placement of the stages, as the launcher or else Megatron does; return what is switched off for it."""
    no_longer: list[str] = []
    if args.run.has_schedule:
        check_costs_file(args.run)
        args.zero_bubble, args.source, no_longer = checks.configure(args, args.run)
        args.placement = args.source.placement
    else:
        ranks, chunks = args.pipeline_model_parallel_size, checks.chunks_of_job(args) or 1
        if chunks > 1 and ranks == 1:
            raise UserError(
                f"several stages per pipeline rank need 2 or more pipeline ranks, got {chunks} stages and 1 rank; drop "
                "the flag or raise --pipeline-model-parallel-size"
            )
        args.source, args.placement = None, Placement.interleaved(ranks, max(1, chunks))
    chunks = args.placement.num_stages // args.placement.num_ranks
    args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    return no_longer
