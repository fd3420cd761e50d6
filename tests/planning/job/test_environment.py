"""Flags in the environment of a process without a command line: the same parser, the same sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.planning.codecs import variable
from megatron.zero_bubble.planning.decisions import DECISIONS
from megatron.zero_bubble.planning.job.environment import flags_in
from megatron.zero_bubble.planning.job.flags import parse_ours
from megatron.zero_bubble.planning.setup import Given
from tests.planning.test_source import divided_plan

H1 = {"ZERO_BUBBLE_SCHEDULE": "zb-h1"}
AUTO = {"ZERO_BUBBLE_SCHEDULE": "zb-auto"}


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({}, ""),
        (H1, "--zero-bubble-schedule zb-h1"),
        ({**H1, "ZERO_BUBBLE_EXACT": "1"}, "--zero-bubble-schedule zb-h1 --zero-bubble-exact"),
        ({**H1, "ZERO_BUBBLE_EXACT": "0"}, "--zero-bubble-schedule zb-h1"),
        ({**H1, "ZERO_BUBBLE_FUSE_WGRAD": "0"}, "--zero-bubble-schedule zb-h1 --no-zero-bubble-fuse-wgrad"),
        (
            {**AUTO, "ZERO_BUBBLE_MEMORY_LIMIT": "0.5p", "ZERO_BUBBLE_SLICE_ENDS": "8,16", "ZERO_BUBBLE_PLACEMENT": ""},
            "--zero-bubble-schedule zb-auto --zero-bubble-memory-limit 0.5p --zero-bubble-slice-ends 8,16",
        ),
        ({"ZERO_BUBBLE_DEVICE": "cpu", "HOME": "/root", "ZERO_BUBBLER": "x"}, "--zero-bubble-device cpu"),
    ],
)
def test_variables_are_the_flags(variables: dict[str, str], flags: str) -> None:
    assert flags_in(variables) == parse_ours(flags.split())[0]


def test_a_plan_file_decides_as_with_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(divided_plan(1)))
    setup = flags_in({"ZERO_BUBBLE_SCHEDULE": str(file)}).setup
    assert setup.order == Given(str(file)) and setup.vocabulary == Divided(1)


@pytest.mark.parametrize(
    "flags",
    [
        "--zero-bubble-placement=diagonal",
        "--zero-bubble-num-slices=three",
        "--zero-bubble-unit-microbatches=0",
        "--zero-bubble-exact",
        "--zero-bubble-placement=vee",
        "--zero-bubble-schedule=zb-h1 --zero-bubble-schedule-file=x.json",
        "--zero-bubble-schedule=zb-h1 --zero-bubble-memory-limit=1p",
    ],
)
def test_a_wrong_value_has_the_sentence_of_the_flag(flags: str) -> None:
    variables = {}
    for flag in flags.split():
        name, _, value = flag.removeprefix("--").partition("=")
        variables[name.replace("-", "_").upper()] = value or "1"
    with pytest.raises(UserError) as of_variables:
        flags_in(variables)
    with pytest.raises(UserError) as of_flags:
        parse_ours(flags.split())
    assert str(of_variables.value) == str(of_flags.value)


def test_unknown_variables_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"unknown variable ZERO_BUBBLE_SCHEDUL; did you mean ZERO_BUBBLE_SCHEDULE\?; "):
        flags_in({"ZERO_BUBBLE_SCHEDUL": "zb-h1"})
    with pytest.raises(UserError, match="unknown variable ZERO_BUBBLE_; variables are named like the flags"):
        flags_in({"ZERO_BUBBLE_": "zb-h1"})
    assert variable(DECISIONS[0]) == "ZERO_BUBBLE_SCHEDULE"


def test_switches_are_1_or_0() -> None:
    with pytest.raises(
        UserError, match=r"ZERO_BUBBLE_EXACT must be 1 \(on\) or 0 \(off\); got 'yes'; give one of them"
    ):
        flags_in({"ZERO_BUBBLE_SCHEDULE": "zb-h1", "ZERO_BUBBLE_EXACT": "yes"})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("POST_VALIDATION", "1", r"call megatron\.zero_bubble\.apply\(\) in the loop"),
        ("SHARD_WEIGHTS", "1", r"call megatron\.zero_bubble\.apply\(\) in the loop"),
        ("TRACE", "folder", "run a Megatron-LM script with python -m megatron"),
        ("LOG_BUBBLE", "1", "run a Megatron-LM script with python -m megatron"),
    ],
)
def test_what_only_a_loop_can_provide_is_refused(name: str, value: str, remedy: str) -> None:
    with pytest.raises(UserError, match=f"ZERO_BUBBLE_{name} has no effect by itself, because .*; got .*; .*{remedy}"):
        flags_in({"ZERO_BUBBLE_SCHEDULE": "zb-h1", f"ZERO_BUBBLE_{name}": value})
