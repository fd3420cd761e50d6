"""Every ``--zero-bubble-*`` flag becomes the same configuration as ever."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.plan.shard import DEFAULT_OPEN_CHUNKS
from megatron.zero_bubble.planning.decisions import DECISIONS, REMOVED
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.environment import flags_in
from megatron.zero_bubble.planning.job.flags import add_flags, full_help, parse_ours, retired
from tests.planning.test_source import divided_plan

OF_SCHEDULE = {"zb-h1": {"schedule": "zb-h1"}, "zb-auto": {"schedule": "zb-auto"}}
FROZEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--zero-bubble-schedule zb-v", {"schedule": "zb-v"}),
    ("--zero-bubble-schedule zb-auto", OF_SCHEDULE["zb-auto"]),
    ("--zero-bubble-schedule-file plan.json", {"schedule_file": "plan.json"}),
    ("--zero-bubble-schedule ./plan.json", {"schedule_file": "./plan.json"}),
    ("zb-auto --zero-bubble-num-slices 3", {"num_slices": 3}),
    ("zb-auto --zero-bubble-slice-ends 8,12,16", {"slice_ends": (8, 12, 16)}),
    ("zb-auto --zero-bubble-slices 3", {"num_slices": 3}),
    ("zb-auto --zero-bubble-slices 8,12,16", {"slice_ends": (8, 12, 16)}),
    ("zb-auto --zero-bubble-attention-share 0.25", {"attention_share": 0.25}),
    ("zb-h1 --zero-bubble-attention-share 0.25 --zero-bubble-balance-microbatches", {}),
    ("zb-h1 --zero-bubble-vocabulary-parallel off", {}),
    ("zb-h1 --zero-bubble-vocabulary-parallel 1", {"vocabulary": 1}),
    (
        "zb-h1 --zero-bubble-vocabulary-parallel 2 --zero-bubble-recompute-logits",
        {"vocabulary": 2, "recompute_logits": True},
    ),
    ("zb-h1 --zero-bubble-recompute", {"early_recompute": True}),
    ("zb-auto --zero-bubble-recompute early", {"early_recompute": True}),
    (
        "zb-h1 --zero-bubble-vocabulary-parallel 2 --zero-bubble-recompute logits",
        {"vocabulary": 2, "recompute_logits": True},
    ),
    (
        "zb-h1 --zero-bubble-vocabulary-parallel 2 --zero-bubble-recompute early,logits",
        {"vocabulary": 2, "early_recompute": True, "recompute_logits": True},
    ),
    ("zb-auto --zero-bubble-placement vee", {"placement": "vee"}),
    ("zb-auto --zero-bubble-placement linear", {}),
    ("zb-auto --zero-bubble-placement wave --zero-bubble-num-chunks 6", {"placement": "wave", "num_chunks": 6}),
    ("zb-auto --zero-bubble-memory-limit 0.5p", {"memory_limit": "0.5p"}),
    ("zb-h1 --zero-bubble-post-validation", {"post_validation": True}),
    (
        "zb-h1 --zero-bubble-post-validation --zero-bubble-rollback inverse",
        {"post_validation": True, "rollback": "inverse"},
    ),
    ("zb-h1 --zero-bubble-post-validation inverse", {"post_validation": True, "rollback": "inverse"}),
    (
        "zb-h1 --zero-bubble-rollback inverse --zero-bubble-post-validation",
        {"post_validation": True, "rollback": "inverse"},
    ),
    ("zb-h1 --zero-bubble-exact", {"fuse_wgrad": False}),
    ("zb-h1 --zero-bubble-fuse-wgrad", {}),
    ("zb-h1 --no-zero-bubble-fuse-wgrad", {"fuse_wgrad": False}),
    ("zb-h1 --zero-bubble-exact --no-zero-bubble-fuse-wgrad", {"fuse_wgrad": False}),
    ("zb-h1 --zero-bubble-post-receives late", {"post_receives": "late"}),
    ("zb-h1 --zero-bubble-post-receives early", {}),
    ("zb-h1 --zero-bubble-nccl-ctas 4", {"nccl_ctas": 4}),
    (
        "zb-h1 --zero-bubble-vocabulary-parallel 2 --zero-bubble-nccl-ctas 4,6",
        {"vocabulary": 2, "nccl_ctas": 4, "nccl_collective_ctas": 6},
    ),
    (
        "zb-h1 --zero-bubble-vocabulary-parallel 2 --zero-bubble-nccl-collective-ctas 4",
        {"vocabulary": 2, "nccl_collective_ctas": 4},
    ),
    ("zb-h1 --zero-bubble-offload none", {"offload": "none"}),
    ("zb-h1 --zero-bubble-offload 50% --zero-bubble-host-memory 1GiB", {"offload": "50%", "host_memory": "1GiB"}),
    ("zb-h1 --zero-bubble-shard-weights", {"shard_weights": True}),
    ("zb-h1 --zero-bubble-shard-weights on-demand", {"shard_weights": True, "shard_transport": "on-demand"}),
    (
        "zb-h1 --zero-bubble-shard-weights --zero-bubble-shard-transport on-demand --zero-bubble-whole-stages 1",
        {"shard_weights": True, "shard_transport": "on-demand", "whole_stages": 1},
    ),
    (
        "zb-h1 --zero-bubble-shard-weights --zero-bubble-shard-transport collective",
        {"shard_weights": True},
    ),
    ("--zero-bubble-schedule zero-pp --zero-bubble-unit-microbatches auto", {"schedule": "zero-pp"}),
    (
        "--zero-bubble-schedule zero-pp --zero-bubble-unit-microbatches 3",
        {"schedule": "zero-pp", "unit_microbatches": 3},
    ),
    ("--zero-bubble-schedule zero-pp --zero-bubble-costs c.json", {"schedule": "zero-pp", "costs_file": "c.json"}),
    (
        "--zero-bubble-schedule dualpipe-v --zero-bubble-overlap-experts",
        {"schedule": "dualpipe-v", "overlap_experts": True},
    ),
    ("--zero-bubble-schedule zb-auto --zero-bubble-keep-faster", {"schedule": "zb-auto", "keep_faster": True}),
    ("zb-h1 --zero-bubble-balance-microbatches", {}),
    ("zb-h1 --zero-bubble-trace x --zero-bubble-trace-iterations 2-3,7", {}),
    ("zb-h1 --zero-bubble-record-costs x", {}),
    ("zb-h1 --zero-bubble-log-bubble", {}),
    ("zb-h1 --zero-bubble-device cpu", {}),
)
"""Flags, after the name of a schedule, and the fields of the configuration that differ from those of that schedule."""


@pytest.mark.parametrize(("words", "fields"), FROZEN, ids=[words for words, _ in FROZEN])
def test_flags_become_an_equal_configuration(
    words: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(plan_to_json(divided_plan(2)))
    first, *rest = words.split()
    schedule = OF_SCHEDULE.get(first)
    given = words.split() if schedule is None else ["--zero-bubble-schedule", first, *rest]
    assert ZeroBubbleConfig.of(parse_ours(given)[0]).setup == ZeroBubbleConfig(**{**(schedule or {}), **fields}).setup


def test_every_flag_is_frozen() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    frozen = " ".join(words for words, _ in FROZEN).split()
    every = {flag for action in parser._actions for flag in action.option_strings} - {"--zero-bubble-help-all"}
    every -= {f"--zero-bubble-{flag}" for flag in REMOVED}
    assert len(every) >= 30
    assert every - {"--zero-bubble-schedule"} <= set(frozen)


@pytest.mark.parametrize("flag", REMOVED)
def test_a_removed_flag_is_refused_with_the_reason(flag: str) -> None:
    with pytest.raises(UserError, match=f"--zero-bubble-{flag} was removed, because .*; leave it out"):
        parse_ours([f"--zero-bubble-{flag}"])
    with pytest.raises(UserError, match=f"--zero-bubble-{flag} was removed, because .*; leave it out"):
        flags_in({f"ZERO_BUBBLE_{flag.replace('-', '_').upper()}": "1"})


def test_retired_flags_work_and_name_their_replacement() -> None:
    """So does --zero-bubble-help-all; docs/flags.md has the others only."""
    old = [row for row in DECISIONS if row.tier == "retired"]
    assert len(old) == 8 and len(DECISIONS) - len(old) <= 26
    words = [f"--zero-bubble-{row.flag}" for row in old]
    assert [line.partition(" is ")[0] for line in retired([*words, "--no-zero-bubble-fuse-wgrad"])] == words
    (line,) = retired(["--zero-bubble-slice-ends=8,16", "--zero-bubble-exact"])
    assert line.endswith(
        "-ends is retired, and refused from the next minor release on: give --zero-bubble-slices TOKENS"
    )
    listed = (Path(__file__).resolve().parents[3] / "docs/flags.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser()
    add_flags(parser)
    printed = full_help(parser)
    for flag in words:
        assert f"`{flag}" not in listed and f"{flag}" in printed


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("slices 8,x", "ends of slices are numbers of tokens, such as 1536,2560,4096; got '8,x'"),
        ("slices", "expected one argument"),
        ("nccl-ctas 2,3,4", "it is one number of CTAs, or two as in 2,8; got '2,3,4'"),
        ("recompute all", "invalid choice: 'all'"),
        ("post-validation always", "invalid choice: 'always'"),
    ],
)
def test_values_of_flags_that_make_several_decisions_are_checked(flag: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_ours(f"--zero-bubble-{flag}".split())


def test_the_table_states_the_defaults_of_the_configuration() -> None:
    defaults = {field.name: field.default for field in fields(ZeroBubbleConfig)}
    stated = {o.name: o.default for o in DECISIONS if o.name in defaults and " " not in o.default and o.default}
    own = {"whole_stages": DEFAULT_OPEN_CHUNKS, "vocabulary": "off", "nccl_ctas": "2,8"}
    assert stated == {name: str(own.get(name, defaults[name])) for name in stated} and len(stated) == 5
