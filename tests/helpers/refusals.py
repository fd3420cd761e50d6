"""For every row of the tables of refusals, the flags of a job, or of ``plan``, that break it."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.planning import exclusions
from megatron.zero_bubble.planning.decisions import DECISIONS as OURS
from megatron.zero_bubble.planning.exclusions import EXCLUSIONS, OPTIONS
from megatron.zero_bubble.planning.job.effects import EFFECTS, Effect
from megatron.zero_bubble.planning.job.options import flag_of
from megatron.zero_bubble.planning.rule import Exclusion, OptionRule

H1, V, SEQ = (f"--zero-bubble-schedule {name}" for name in ("zb-h1", "zb-v", "seq-zb-h1"))
MEGATRONS_VALUES = {
    "cuda_graph_impl": "local",
    "cpu_offloading_num_layers": "1",
    "mtp_num_layers": "1",
    "logits_save_dir": "x",
    "logits_load_dir": "x",
    "moe_routing_trace_path": "x",
    "context_parallel_size": "2",
    "label_smoothing_factor": "0.1",
    "hybrid_layer_pattern": "M-M*",
    "hybrid_override_pattern": "M-M*",
    "num_distributed_optimizer_instances": "2",
    "save_wgrads_interval": "5",
    "num_moe_experts": "4",
    "num_experts": "4",
    "optimizer": "sgd",
    "moe_expert_rank_capacity_factor": "1.5",
    "fp8": "hybrid",
    "fp4": "e2m1",
    "tp_comm_overlap": "--tensor-model-parallel-size 2 --sequence-parallel",
}
"""Unsupported values of the options that are not switches, and flags without which Megatron refuses a switch."""
_OTHER_VALUES = {
    "num_distributed_optimizer_instances": 2, "save_wgrads_interval": 5, "num_moe_experts": 4, "num_experts": 4,
    "fp8": "e4m3", "fp4": "e2m1", "cpu_offloading_num_layers": 1, "mtp_num_layers": 1, "context_parallel_size": 2,
}  # fmt: skip
"""Unsupported values of options that are not switches, in a configuration."""
VALUES = {
    "post-receives": "late", "nccl-ctas": "1", "offload": "all", "host-memory": "1GiB", "shard-transport": "on-demand",
    "unit-microbatches": "2", "whole-stages": "1", "num-slices": "2", "slice-ends": "16,32", "attention-share": "0.1",
    "vocabulary-parallel": "2", "placement": "vee", "memory-limit": "1p", "costs": "x", "rollback": "inverse",
    "num-chunks": "2", "trace": "x", "record-costs": "x", "trace-iterations": "50-60", "nccl-collective-ctas": "4",
    "recompute": "early",
}  # fmt: skip
"""Values of our own flags that are not switches."""
_JOBS = {
    **dict.fromkeys(("num-chunks", "overlap-experts"), "--zero-bubble-schedule zb-auto"),
    "recompute": "--zero-bubble-schedule plan.json",
}
"""The job of options that have an effect with other schedules."""
_SUBJECTS = {
    "stages on a V or in a wave": V,
    "post-validation": f"{H1} --zero-bubble-post-validation",
    "sequence slices": SEQ,
    "vocabulary parallelism": f"{H1} --zero-bubble-vocabulary-parallel 2",
    "pairs": "--zero-bubble-schedule dualpipe-v --zero-bubble-overlap-experts",
    "sharded units": "--zero-bubble-schedule zero-pp --zero-bubble-shard-weights --use-distributed-optimizer",
}
_CHOICES = {
    exclusions.SCHEDULE_FILE: ("--zero-bubble-schedule-file plan.json", ""),
    exclusions.SLICES: (SEQ, "--num-slices 2"),
    exclusions.VOCABULARY: ("--zero-bubble-vocabulary-parallel 2", "--vocabulary auto"),
    exclusions.PLANS: ("--zero-bubble-schedule zb-auto", "--schedule zb-auto"),
    exclusions.OFFLOAD: ("--zero-bubble-offload all", "--offload auto"),
    exclusions.MEASURED_OFFLOAD: ("--zero-bubble-offload auto", "--offload auto"),
    exclusions.SHARDS: ("--zero-bubble-shard-weights", "--shard-weights"),
    exclusions.COLLECTIVES: ("--zero-bubble-shard-weights", ""),
    exclusions.POST_VALIDATION: ("--zero-bubble-post-validation", ""),
    exclusions.PAIRS: ("--zero-bubble-overlap-experts", "--pairs"),
    exclusions.EARLY: ("--zero-bubble-recompute early", "--early-recompute"),
    exclusions.RECORDED_COSTS: ("--zero-bubble-record-costs x", ""),
    exclusions.BALANCE: ("--zero-bubble-balance-microbatches", ""),
    exclusions.LENGTHS: ("--zero-bubble-balance-microbatches", ""),
    exclusions.UNTOLD_LENGTHS: ("", ""),  # by a model's configuration, or by shapes
}
"""The flags that make a choice, in a job and in ``plan``; "" where it cannot be made."""


def unsupported(rule: OptionRule) -> Any:
    """A value that a row refuses or switches off, as configurations have it."""
    if isinstance(rule.value, bool):
        return not rule.value
    return _OTHER_VALUES.get(rule.option, MEGATRONS_VALUES.get(rule.option, "x"))


def jobs_of_options() -> list[tuple[OptionRule, str]]:
    """One job of Megatron-LM per option that a schedule neither supports nor switches off."""
    found = []
    for rule in OPTIONS:
        if rule.choice not in (exclusions.BALANCE, exclusions.LENGTHS) and not rule.is_set:
            job, flag = _SUBJECTS.get(rule.choice.words, H1), flag_of(rule.option)
            words = f"{job} {flag} {MEGATRONS_VALUES.get(rule.option, '')}"
            found.append((rule, words if rule.value is not True else job.replace(flag, "").strip()))
    return found


def jobs_of_effects(under_launcher: bool) -> list[tuple[Effect, str]]:
    """One job per option without effect, in which it is the first refusal."""
    found = []
    for rule in EFFECTS:
        option = next(one for one in OURS if one.name == rule.name)
        only_there = rule.needs.words == "scripts/pretrain_gpt.py" or rule.why.startswith(" to measure")
        only_here = "stock Megatron can be observed" in rule.why
        if only_here if under_launcher else only_there:
            continue
        job = "" if "got none" in rule.why or only_here else _JOBS.get(option.flag, H1)
        job = f"{H1} --zero-bubble-trace x" if "{last}" in rule.why else job
        found.append((rule, f"{job} --zero-bubble-{option.flag} {VALUES.get(option.flag, '')}".strip()))
    return found


def jobs_of_exclusions(under_launcher: bool) -> list[tuple[Exclusion, str]]:
    """One job per pair of choices that a job can make."""
    found = []
    for rule in EXCLUSIONS:
        (one, _), (other, _) = _CHOICES[rule.one], _CHOICES[rule.other]
        if one and other and not (under_launcher and rule.one in (exclusions.BALANCE, exclusions.LENGTHS)):
            words = f"{one} {other}"
            found.append((rule, words if "--zero-bubble-schedule" in words else f"{H1} {words}"))
    return found


def plans_of_exclusions() -> list[tuple[Exclusion, str]]:
    """The commands ``plan`` and ``compare`` per pair of choices that they offer; ``compare`` has no schedule, and rows
    of their own for ``--vocabulary auto``.
    """
    found = []
    for rule in EXCLUSIONS:
        (_, one), (_, other) = _CHOICES[rule.one], _CHOICES[rule.other]
        words = f"{one} {other}"
        if one and other:
            found.append((rule, f"plan {words}" if "--schedule" in words else f"plan --schedule zero-pp {words}"))
            if "--schedule" not in words:
                found.append((rule, f"compare {words.replace('auto', '2') if 'vocabulary' in words else words}"))
    return found
