"""What a plan decides is in its file: reading returns it, the table of keys is complete, and other keys are ignored."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.__main__ import parser
from megatron.zero_bubble.cli.plan import question_of
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import PlanFile, plan_from_json
from megatron.zero_bubble.core.formats.plan_keys import PLAN_KEYS
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.plan_file import decided, written

ROOT = Path(__file__).parents[2]
TIMES = "--forward-ms 4 --backward-ms 5 --wgrad-ms 3 --num-ranks 3 --num-microbatches 6"
FEW = "--forward-ms 4 --backward-ms 5 --wgrad-ms 3 --num-ranks 2 --num-microbatches 3"
LOSS = "--output-ms 0.8 --output-wgrad-ms 0.6"
SHARDS = "--shard-weights --gather-ms 1 --reduce-ms 1 --replicas 2"
OF_MODEL = "--num-ranks 4 --num-microbatches 8"
COMMANDS = {
    "limit": f"--schedule zb-h1 {TIMES} --memory-limit 1p",
    "search": f"--schedule zb-auto {FEW}",
    "even slices": f"--schedule seq-zb-h1 {TIMES}",
    "slices": f"--schedule seq-zb-h1 {TIMES} --num-slices 3 --attention-share 0.4",
    "vocabulary": f"--schedule zb-h1 {TIMES} --vocabulary 1 {LOSS}",
    "other vocabulary": f"--schedule interleaved-1f1b {TIMES} --vocabulary 2 {LOSS}",
    "offload": f"--schedule zb-h2 {TIMES} --offload auto --host-ms 3",
    "dropped": f"--schedule zb-auto {FEW} --memory-limit 0.3p --offload auto --host-ms 1",
    "share": f"--schedule zb-h2 {TIMES} --offload 50% --host-ms 1",
    "nothing moves": f"--schedule zb-h1 {TIMES} --offload auto --host-ms 300",
    "offload and vocabulary": f"--schedule zb-h2 {TIMES} --vocabulary 2 {LOSS} --offload auto --host-ms 3",
    "shards": f"--schedule zero-pp {TIMES} {SHARDS} --unit-microbatches 4 --whole-stages 1",
    "shards of any schedule": f"--schedule interleaved-1f1b --num-chunks 3 {TIMES} {SHARDS} --whole-stages auto",
    "model": f"--schedule zb-h1 {OF_MODEL} --config CONFIG",
    "recomputed logits": f"--schedule zb-h1 {OF_MODEL} --config CONFIG --vocabulary 2 --recompute-logits",
    "layout": f"--schedule zb-h1 {OF_MODEL} --config CONFIG --layout auto",
    "layout and offload": f"--schedule zb-h2 {OF_MODEL} --config CONFIG --layout auto --offload auto --host-ms 3",
    "needed layout": f"--schedule zb-v {OF_MODEL} --config CONFIG",
    "pairs": "--schedule dualpipe-v --pairs --num-ranks 2 --num-microbatches 6 --costs EXPERTS",
    "overlap": "--schedule zb-v --pairs --num-ranks 2 --num-microbatches 6 --costs EXPERTS",
    "halved stages": "--schedule interleaved-1f1b --num-ranks 2 --num-microbatches 4 --costs COSTS",
}
_COSTS = {"forward_ms": [4.0, 6.0], "backward_ms": [4.0, 6.0], "wgrad_ms": [3.0, 5.0]}


@cache
def planned(name: str, folder: Path) -> tuple[PlanFile, str]:
    """What the plan decides, and its file."""
    costs = folder / "costs.json"
    costs.write_text(json.dumps(_COSTS))
    words = COMMANDS[name].replace("CONFIG", str(ROOT / "configs/gpt_1.5b.yaml")).replace("COSTS", str(costs))
    words = words.replace("EXPERTS", str(ROOT / "configs/published/deepseek_v3_h800.json"))
    plan = answer(question_of(parser().parse_args(["plan", *words.split()])))
    return decided(plan), written(plan)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.mark.parametrize("name", COMMANDS)
def test_what_was_decided_is_read_as_written(name: str, folder: Path) -> None:
    plan, text = planned(name, folder)
    assert plan_from_json(text) == plan


def test_the_plans_decide_each_thing(folder: Path) -> None:
    """So that the test above compares more than defaults."""
    plans = [planned(name, folder)[0] for name in COMMANDS]
    assert {plan.divided and plan.divided.algorithm for plan in plans} == {None, 1, 2}
    assert {len(plan.schedule.slices) for plan in plans} >= {1, 3}
    assert any(plan.divided is not None and plan.divided.recompute_logits for plan in plans)
    assert any(plan.schedule.pairs for plan in plans) and any(plan.schedule.overlap_experts for plan in plans)
    assert any(plan.added.moves for plan in plans) and any(plan.offload and not plan.added.moves for plan in plans)
    assert {None, 1} < {plan.added.sharding and plan.added.sharding.open_chunks for plan in plans}
    assert sum(plan.layout is not None for plan in plans) >= 3


def test_the_table_has_the_keys_that_plans_write(folder: Path) -> None:
    keys = {key for name in COMMANDS for key in json.loads(planned(name, folder)[1])}
    assert keys == {key.name for key in PLAN_KEYS}
    assert len(keys) == len(PLAN_KEYS)


@pytest.mark.parametrize("key", PLAN_KEYS, ids=lambda key: key.name)
def test_readers_take_the_keys_that_decide_and_ignore_the_others(key: Any, folder: Path) -> None:
    name, plan, content = next(
        (name, plan, content)
        for name in COMMANDS
        for plan, content in [(planned(name, folder)[0], json.loads(planned(name, folder)[1]))]
        if key.name in content
    )
    damaged = json.dumps(content | {key.name: {"no": "form"}})
    if not key.decides:
        assert plan_from_json(damaged) == plan, name  # whatever the facts are
    else:
        with pytest.raises(UserError, match=key.name):
            plan_from_json(damaged)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("shards", {"whole_stages": 0}, "whole_stages must be a whole number above 0; got 0"),
        ("shards", {"unit_microbatches": None}, "unit_microbatches must be a whole number above 0; got null"),
        ("model", {"shard_weights": True}, "sharded units need 2 or more stages per rank"),
        ("model", {"recompute_logits": True}, "recompute_logits needs passes of a divided vocabulary and the key voc"),
        ("layout", {"layers_per_stage": [1, 2]}, "layers_per_stage must agree with pipeline_model_parallel_layout"),
        ("needed layout", {"needed_layout": "Et|tL"}, "needed_layout must have one part per stage, 8; got 2 in"),
    ],
)
def test_decisions_that_do_not_fit_are_refused(name: str, change: dict[str, Any], sentence: str, folder: Path) -> None:
    content = json.loads(planned(name, folder)[1])
    with pytest.raises(UserError, match=sentence):
        plan_from_json(json.dumps(content | change))
