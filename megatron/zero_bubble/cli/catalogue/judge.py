"""What the dry run and the quick advice say of a recipe, as one row of the catalogue."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron.zero_bubble.cli.advice_text import words_of_row
from megatron.zero_bubble.cli.advise import advised, defaults
from megatron.zero_bubble.cli.catalogue.recipe import Recipe, world_of
from megatron.zero_bubble.cli.megatron_job import checked_megatron_job, parsed_megatron_job
from megatron.zero_bubble.core.errors import Refusal, UserError, attempted, beyond_floats
from megatron.zero_bubble.core.ir.sizes import TooLarge
from megatron.zero_bubble.planning.idle import exposed_ms, idle_of
from megatron.zero_bubble.planning.source import ZB_AUTO

GAINS, STAYS, REFUSED = "gains", "stays", "refused"
BROKEN, SINGLE, OTHER, UNREAD = "broken", "no pipeline", "no training of a GPT", "not read"
UNANSWERED = "no answer"
OUTCOMES = {
    GAINS: "a change of the schedule or of the layers per stage is worth it",
    STAYS: "nothing gains enough; what the job runs is right",
    REFUSED: "the job runs, but not under a schedule of this package",
    BROKEN: "the job itself stops with this error",
    SINGLE: "there is one pipeline rank, so there is no bubble",
    OTHER: "another kind of model, inference, or a conversion",
    UNREAD: "no job was found in the file",
    UNANSWERED: "the job is too large for an answer within the limits of the catalogue",
}
"""What can be said of a recipe, and what it means."""
_PROGRAMS = ("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py", "train_rl.py", "")
_NAMES = re.compile(r"--[a-z0-9-]+|\b[a-z0-9]+(?:_[a-z0-9]+)+\b")
"""The flags, and the fields of megatron-core's configuration, that a reason names."""
_OF_TRAINING = ("--train-", "--lr")
"""How flags begin of which a training needs one."""
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}


@dataclass(frozen=True)
class Row:
    """A row of the catalogue; what is not known is None.

    Attributes:
        outcome: a key of ``OUTCOMES``.
        option: what the job is refused for, or what is wrong with it, as a flag where the reason names one.
        reason: the same as a sentence.
        gpu, gpus: on which it was judged.
        is_assumed: whether their number is, because the recipe gives none or too few for its parallelism.
        ranks, stages, microbatches: of the pipeline, stages per rank.
        bubble: idle time of the pipeline by the closed form for passes of equal length.
        idle: mean idle time of the ranks as a share of the iteration, by estimated costs.
        change, flags, gain: the best change, the variables and flags to add, and the share of the time that it saves.
        exposed: with searches, what all-to-alls of experts add to the mean work of the ranks (``exposed_ms``), as a
            share of the iteration.
        idle_then, exposed_then: the same of the best change.
        seconds: CPU time that the answer took.
    """

    name: str
    outcome: str
    option: str = ""
    reason: str = ""
    gpu: str | None = None
    gpus: int | None = None
    is_assumed: bool = False
    ranks: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    bubble: float | None = None
    idle: float | None = None
    change: str = ""
    flags: str = ""
    gain: float | None = None
    exposed: float | None = None
    idle_then: float | None = None
    exposed_then: float | None = None
    seconds: float = 0.0


def judged(recipe: Recipe, gpu: str, searches: bool = False) -> Row:
    """Judge a recipe.

    Args:
        gpu: a key of ``DEVICES``, for recipes that do not say on which they run.
        searches: whether the advice is that with searches, and changes also do without what refuses them.
    """
    started = time.process_time()
    row = Row(recipe.name, UNREAD, reason=recipe.problem or "", gpu=recipe.gpu or gpu)
    if recipe.problem is None:
        row = _of_job(recipe, row, searches)
    return replace(row, seconds=time.process_time() - started)


def _of_job(recipe: Recipe, row: Row, searches: bool) -> Row:
    if recipe.program not in _PROGRAMS:
        return replace(row, outcome=OTHER, option=recipe.program)
    if "--help" in recipe.flags or not any(word.startswith(_OF_TRAINING) for word in recipe.flags):
        return replace(row, outcome=OTHER)
    parsed = attempted(partial(parsed_megatron_job, recipe.flags, 1, 1))
    if isinstance(parsed, Refusal):
        return _because(row, BROKEN, recipe, parsed.reason)
    sizes = {name: max(1, getattr(parsed.args, of)) for name, of in _SIZES.items()}
    nodes, per_node, is_assumed = world_of(recipe, sizes)
    row = replace(row, gpus=nodes * per_node, is_assumed=is_assumed, ranks=sizes["pipeline"])
    if sizes["pipeline"] < 2 and parsed.args.num_layers is None and not recipe.program:
        return replace(row, outcome=SINGLE)  # of Megatron-Bridge, which has the sizes elsewhere
    try:
        checked = checked_megatron_job(recipe.flags, nodes * per_node, per_node)
    except UserError as error:
        return _because(row, UNANSWERED if isinstance(error, TooLarge) else BROKEN, recipe, str(error))
    if sizes["pipeline"] < 2:
        return replace(row, outcome=SINGLE)
    placement = checked.args.placement
    has_several = placement.num_stages > placement.num_ranks
    searched = (ZB_AUTO, *(("--zero-bubble-placement", "loop") if has_several else ()))
    for own in (searched, ("zb-interleaved" if has_several else "zb-h1",)):
        ours = (*recipe.flags, "--zero-bubble-schedule", *own)
        refused = attempted(partial(checked_megatron_job, ours, nodes * per_node, per_node))
        if not isinstance(refused, Refusal):
            break
    options = defaults()
    options.nodes, options.gpus_per_node, options.gpu = nodes, per_node, row.gpu
    options.quick, options.remedies = not searches, searches
    try:
        row = _of_advice(row, options, recipe.flags)
    except (UserError, OverflowError) as error:
        return _because(row, REFUSED, recipe, beyond_floats(error) if isinstance(error, OverflowError) else str(error))
    if isinstance(refused, Refusal) and "--zero-bubble-schedule" not in row.flags:
        return _because(row, REFUSED, recipe, refused.reason)
    return row


def _of_advice(row: Row, options: argparse.Namespace, flags: Sequence[str]) -> Row:
    """The row with what the advice says.

    Raises:
        UserError: there is none.
    """
    own, advice, *_ = advised(options, flags)
    timeline, costs, _ = advice.today
    placement, best = timeline.schedule.placement, advice.best
    passes, then = costs.on(placement)[0], None if best is None else best.timeline
    ranks, stages, count = placement.num_ranks, placement.num_stages // placement.num_ranks, costs.num_microbatches
    words: tuple[str, ...] = ()
    if best is not None:
        add, leave_out = words_of_row(best, own.parsed.setup, flags)
        words = (*best.environment, *add, *(f"(without {word})" for word in leave_out))
    if not options.quick:  # whose timelines may have only few of the microbatches
        row = replace(
            row,
            exposed=exposed_ms(timeline, passes) / timeline.makespan_ms,
            idle_then=None if then is None else then.idle_rate("makespan"),
            exposed_then=None if then is None else exposed_ms(then, passes) / then.makespan_ms,
        )
    return replace(
        row,
        outcome=STAYS if best is None else GAINS,
        stages=stages,
        microbatches=count,
        bubble=(ranks - 1) / (stages * count + ranks - 1),
        idle=idle_of(timeline, passes).total / timeline.makespan_ms,
        change="" if best is None else best.change.name,
        flags=" ".join(words),
        gain=None if best is None else best.gain,
    )


def unanswered(recipe: Recipe, gpu: str, why: str) -> Row:
    """The row of a recipe whose answer was given up.

    Args:
        why: the reason, and what to do.
    """
    return _because(Row(recipe.name, UNANSWERED, gpu=recipe.gpu or gpu), UNANSWERED, recipe, why)


def _because(row: Row, outcome: str, recipe: Recipe, reason: str) -> Row:
    """The row with the reason of a refusal, and the first flag of the job that this names."""
    given = {word.partition("=")[0] for word in recipe.flags if word.startswith("--")}
    named = [f"--{name.removeprefix('--').replace('_', '-')}" for name in _NAMES.findall(reason)]
    option = next(
        (word for word in named if word in given),
        next((name for name in _NAMES.findall(reason) if name.startswith("--")), ""),
    )
    return replace(row, outcome=outcome, option=option, reason=reason)
