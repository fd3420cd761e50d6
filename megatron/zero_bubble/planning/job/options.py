"""Check what options of Megatron are under our choices, by the tables in ``planning/exclusions.py``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron.zero_bubble.core.errors import Remedy, UserError, as_flag
from megatron.zero_bubble.planning.exclusions import (
    BALANCE,
    ON_A_V,
    OPTIONS,
    SCHEDULE,
    refuse_excluded,
)
from megatron.zero_bubble.planning.graph_exclusions import GRAPH_OPTIONS, GRAPHS
from megatron.zero_bubble.planning.job.graphs import captures_only_rollouts
from megatron.zero_bubble.planning.job.overlaps import OVERLAPS
from megatron.zero_bubble.planning.ranges import RANGES
from megatron.zero_bubble.planning.rule import Choice, OptionRule
from megatron.zero_bubble.planning.run_options import RunOptions

_SPELLED = {
    "overlap_p2p_comm_warmup_flush": "overlap_p2p_communication_warmup_flush",
    "fp8": "fp8_format",
    "fp4": "fp4_format",
    "nccl_ub": "use_nccl_ub",
    "num_moe_experts": "num_experts",
}
_BESIDE_THE_TABLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--fp8-recipe", {"default": "delayed"}),
    ("--moe-shared-expert-overlap", {"action": "store_true"}),
    *(
        (f"--{no}-{option.replace('_', '-')}", {"dest": option, "action": "store_false"})
        for option in OVERLAPS.values()
        for no in ("no", "disable")
    ),
    ("--cuda-graph-scope", {"nargs": "+"}),
    ("--cuda-graph-modules", {"nargs": "*"}),
    ("--rl-training-cuda-graphs", {"action": "store_true"}),
    ("--cuda-graph-warmup-steps", {"type": int}),
    ("--multi-latent-attention", {"action": "store_true"}),
    ("--experimental-attention-variant", {}),
    ("--mtp-num-layers", {"type": int}),
    ("--use-transformer-engine-op-fuser", {"action": "store_true"}),
    ("--use-grouped-gemm-for-dense-mlp", {"action": "store_true"}),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage",
        {"dest": "microbatch_group_size_per_vp_stage", "type": int},
    ),
)
"""Flags of Megatron that are read but not in the table, as arguments of ``add_argument``."""
_COUNTS = ("save_wgrads_interval",)
"""Options whose only supported value, None, does not show that they are numbers."""


def flag_of(option: str) -> str:
    """The flag of Megatron-LM that sets an option."""
    return as_flag(_SPELLED.get(option, option))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``check_options`` reads, as Megatron-LM spells them, except those that the parser has."""
    own = [(rule.option, rule.value) for rule in reversed(OPTIONS) if rule.choice is not BALANCE]
    known = (*own, *GRAPH_OPTIONS.items())
    flags = {flag_of(option): _arguments(option, value) for option, value in known} | dict(_BESIDE_THE_TABLE)
    for flag, arguments in flags.items():
        if flag not in parser._option_string_actions:
            parser.add_argument(flag, **arguments)


def _arguments(option: str, value: Any) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for an option, which by default has its allowed value."""
    if isinstance(value, bool):
        return {"dest": option, "action": "store_true"}
    kind = int if option in _COUNTS else str if value is None else type(value)
    return {"dest": option, "type": kind, "default": value}


def check_options(values: Any, run: RunOptions, megatrons_own: bool = True, of_model: bool = True) -> None:
    """Reject Megatron options that zero-bubble schedules do not support.

    Args:
        values: a ``TransformerConfig``, or the flags of a Megatron-LM job; missing options count as disabled.
        run: what runs, with what its schedules have (``Setup.running``).
        megatrons_own: whether every stage is on the rank where Megatron itself would put it.
        of_model: whether ``values`` are those of the model, and not of what trains it alone.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    if getattr(values, "variable_seq_lengths", False):
        run = replace(run, lengths=("variable_seq_lengths", True))
    graphs = () if captures_only_rollouts(values) else GRAPHS
    rules = (rule for rule in (*graphs, *OPTIONS, *(RANGES if of_model else ())) if rule.choice.is_made(run))
    _check_rules(values, (rule for rule in rules if not (megatrons_own and rule.choice is ON_A_V)))
    if run.lengths is not None:
        refuse_excluded(run)
    recipe = getattr(values, "fp8_recipe", None)
    if run.setup.validates and getattr(values, "fp8", None) and getattr(recipe, "value", recipe) == "delayed":
        raise UserError(
            "post-validation does not support FP8 with delayed scaling, because forwards that run again would count "
            f"twice in the history of maxima; got --fp8-format {values.fp8} --fp8-recipe delayed; give --fp8-recipe "
            "tensorwise, or drop --zero-bubble-post-validation"
        )
    if of_model and run.setup.early_recompute and (kind := getattr(values, "recompute_granularity", None)) != "full":
        raise UserError(
            f"early recomputation needs whole layers that are recomputed; got recompute_granularity={kind!r}; give "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1, or leave it out, in a "
            "plan too"
        )
    group = getattr(values, "microbatch_group_size_per_vp_stage", None)
    # Megatron ignores the group size without virtual stages; its default is the number of pipeline ranks.
    grouped = getattr(values, "virtual_pipeline_model_parallel_size", None) is not None
    if grouped and group not in (None, values.pipeline_model_parallel_size):
        raise UserError(
            "zero-bubble schedules support only a microbatch group size equal to the number of pipeline ranks, got "
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} and {values.pipeline_model_parallel_size} "
            "ranks; drop the flag"
        )
    if grouped and getattr(values, "fine_grained_activation_offloading", False):
        raise UserError(
            "fine-grained offloading of activations needs one stage per rank, because Megatron brings back what "
            "several stages saved in the order of its own interleaved schedule; got "
            f"--fine-grained-activation-offloading and {values.virtual_pipeline_model_parallel_size} stages per rank; "
            "drop it, or choose a schedule with one stage per rank"
        )


def _check_rules(values: Any, rules: Iterable[OptionRule]) -> None:
    for rule in rules:
        if refusal := rule.sentence(values):
            is_of_schedules = rule.choice is SCHEDULE  # other choices have other schedules as remedies
            dropped = Remedy(drops=(flag_of(rule.option),)) if is_of_schedules else None
            raise UserError(refusal, remedy=dropped or rule.flags(getattr(values, rule.option)))


def check_softmax(is_fused: bool) -> None:
    """Reject the softmax of the attention of local layers, if it is Megatron's fused one, under a schedule of slices.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    if is_fused:
        raise UserError(
            "sequence slices cannot use Megatron's fused softmax, which needs as many queries as keys; got "
            "masked_softmax_fusion=True; add --no-masked-softmax-fusion, or use TransformerEngine"
        )


def check_options_of(choice: Choice, values: Any) -> None:
    """Reject Megatron options that one choice does not support.

    Args:
        values: a configuration of megatron-core, or the flags of a job; missing options count as supported.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    _check_rules(values, [rule for rule in OPTIONS if rule.choice is choice])
