"""How the layers of a hybrid model are divided among the stages of a job.

Megatron has stages where the pattern has ``|``. Without one, it gives each pipeline rank one stage with equally many
layers, which leaves layers that do not divide evenly, and several stages per rank, to a pattern that we write.
"""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.core.errors import UserError, as_flag
from megatron.zero_bubble.core.formats.layout import stage_layers
from megatron.zero_bubble.core.formats.pattern import Pattern
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.planning.job.model import hybrid_layers, stated_vocab_size
from megatron.zero_bubble.planning.job.pattern import FLAG, name_of, pattern_of
from megatron.zero_bubble.planning.job.runnable import is_megatrons_own

_OTHER_DIVISIONS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def check_pattern(args: Any) -> None:
    """Check the pattern of a job with a schedule, and set the numbers of layers that follow from it.

    Raises:
        UserError: flags that divide the layers besides the pattern.
    """
    pattern = pattern_of(args)
    if pattern is None:
        return
    for name in _OTHER_DIVISIONS:
        if (value := getattr(args, name, None)) not in (None, False):
            flag = f"{as_flag(name)}{'' if value is True else f' {value}'}"
            raise UserError(
                f"the stages of a hybrid model are the parts of {FLAG} between its |; got {flag} besides "
                f"{pattern.text!r}; drop the flag"
            )
    if pattern.flag == FLAG:  # the older flag came with --num-layers
        args.num_layers = len(pattern.layers)
    if pattern.predictions:
        args.mtp_num_layers = len(pattern.predictions)


def chunks_of_pattern(args: Any, pattern: Pattern) -> int | None:
    """Return the stages per rank of a job's pattern; None if it leaves the division to Megatron.

    Raises:
        UserError: a number of stages that the ranks do not divide; has a pattern.
    """
    ranks = args.pipeline_model_parallel_size
    if len(pattern.stages) == 1:
        return None
    chunks, rest = divmod(len(pattern.stages), ranks)
    if rest:
        placement = Placement.interleaved(ranks, max(1, chunks))
        instead = divided(args, pattern, placement, stated_vocab_size(args))
        raise UserError(
            f"{pattern.flag} must have equally many stages on every pipeline rank, got {len(pattern.stages)} stages "
            f"and {ranks} ranks in {pattern.text!r}; give {pattern.flag} '{instead}'"
        )
    return chunks


def is_hybrid(args: Any) -> bool:
    """Whether a Megatron-LM job trains a hybrid model; until core_r0.16, also one of Mamba layers without a pattern."""
    specified = any("mamba" in part for part in getattr(args, "spec", None) or ())
    return pattern_of(args) is not None or bool(getattr(args, "is_hybrid_model", False)) or specified


def divide_pattern(args: Any, placement: Placement, vocab_size: int | None) -> None:
    """Let a hybrid model have the stages of ``placement``: by Megatron where it can, or else by their work.

    Args:
        vocab_size: the padded size of the vocabulary; None if it is not known yet.

    Raises:
        UserError: several stages per rank where Megatron has one only, or too few layers to fill every stage.
    """
    pattern, chunks = pattern_of(args), placement.num_stages // placement.num_ranks
    if not hasattr(args, name_of(FLAG)):
        if chunks > 1:
            raise UserError(
                f"hybrid models have one stage per rank in this version of Megatron-LM, and the schedule has {chunks}; "
                f"take a schedule with one stage per rank, such as zb-h1, or a Megatron-LM with {FLAG}"
            )
        return
    if pattern is None or len(pattern.stages) > 1:
        return
    ends = [
        f"--decoder-{end}-pipeline-num-layers {count}"
        for end in ("first", "last")
        if (count := getattr(args, f"decoder_{end}_pipeline_num_layers")) is not None
    ]
    if chunks == 1 and (ends or len(pattern.layers) % placement.num_ranks == 0):
        return
    instead = divided(args, pattern, placement, vocab_size)
    if ends:
        raise UserError(
            f"a hybrid model has several stages per rank only by the | of its pattern; got {ends[0]}; drop the flag, "
            f"and give {FLAG} '{instead}'"
        )
    setattr(args, name_of(pattern.flag), instead)


def take_pattern(args: Any, pattern: Pattern, plan: PlanFile, layers: tuple[int, ...], file: str) -> None:
    """Give a hybrid model's stages the layers of a plan, unless its flags do.

    Args:
        layers: layers per stage of the plan.
        file: the plan's file.

    Raises:
        UserError: a plan for another number of layers, or flags that give stages other layers.
    """
    if sum(layers) != len(pattern.layers):
        raise UserError(
            f"the plan in {file} is for {sum(layers)} layers, but {pattern.flag} has {len(pattern.layers)}; plan the "
            "schedule for this model"
        )
    ends = {end: getattr(args, f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")}
    if len(pattern.stages) > 1:
        own = tuple(len(stage) for stage in pattern.stages)
    else:
        own = stage_layers(plan.schedule.placement, len(pattern.layers), **ends)
    if own == layers:
        return
    if len(pattern.stages) > 1 or any(ends.values()):
        raise UserError(
            f"the stages must have the layers of the plan in {file}; got {', '.join(map(str, own))}; give "
            f"{pattern.flag} '{pattern.cut(layers)}'"
        )
    setattr(args, name_of(pattern.flag), pattern.cut(layers))


def check_stages_of_pattern(args: Any, placement: Placement, takes_chunks: bool) -> None:
    """Reject a pattern whose ``|`` give ranks another number of stages than the schedule.

    Args:
        placement: the schedule's, without a number of stages per rank from the job.
        takes_chunks: whether the schedule is selected by name; an interleaved one then takes any number above 1.

    Raises:
        UserError: has a pattern for ``placement``.
    """
    pattern = pattern_of(args)
    if pattern is None or len(pattern.stages) in (1, placement.num_stages):
        return
    is_looped = takes_chunks and placement.num_stages > placement.num_ranks and is_megatrons_own(placement)
    if is_looped and len(pattern.stages) > placement.num_ranks:
        return
    instead = divided(args, pattern, placement, stated_vocab_size(args))
    raise UserError(
        f"the schedule has {placement.num_stages} stages, and {pattern.flag} {len(pattern.stages)} in "
        f"{pattern.text!r}; give {pattern.flag} '{instead}'"
    )


def divided(args: Any, pattern: Pattern, placement: Placement, vocab_size: int | None) -> str:
    """Return the pattern with ``|`` between the stages of ``placement``, with the least work for the busiest rank.

    Raises:
        UserError: for too few layers to fill every stage.
    """
    return pattern.cut(hybrid_layers(args, pattern, placement, vocab_size))
