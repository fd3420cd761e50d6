"""Runs of Megatron-Bridge take their schedule from their configuration; here, against modules that imitate it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest

import megatron.zero_bubble
from megatron.zero_bubble.auto import switch_on
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.integration.bridge import install as bridge
from megatron.zero_bubble.planning.exclusions import (
    BALANCE,
    LENGTHS,
    ON_A_V,
    OPTIONS,
    PAIRS,
    POST_VALIDATION,
    SHARDS,
    SLICES,
    VOCABULARY,
)
from megatron.zero_bubble.planning.rule import OptionRule
from tests.helpers.refusals import unsupported
from tests.integration.bridge.test_stages import configured

MODULES = ("training", "models", "training.pretrain", "models.model_provider")
CHOSEN = {
    ON_A_V.words: {"ZERO_BUBBLE_SCHEDULE": "zb-v"},
    SLICES.words: {"ZERO_BUBBLE_SCHEDULE": "seq-zb-h1"},
    VOCABULARY.words: {"ZERO_BUBBLE_VOCABULARY_PARALLEL": "1"},
    PAIRS.words: {"ZERO_BUBBLE_SCHEDULE": "dualpipe-v", "ZERO_BUBBLE_OVERLAP_EXPERTS": "1"},
}
ROWS = [rule for rule in OPTIONS if rule.choice not in (BALANCE, LENGTHS, SHARDS, POST_VALIDATION)]
"""Without those of what a training loop must provide."""


@pytest.fixture
def pretrain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imitates the module of ``pretrain``, with the stages that each run validated in ``validated``."""
    modules = {name: ModuleType(f"megatron.bridge.{name}") for name in MODULES}
    module, provider = modules["training.pretrain"], modules["models.model_provider"]
    validated: list[int | None] = []

    def runtime_config_update(cfg: Any) -> None:
        for name, value in cfg.env_vars.items():
            monkeypatch.setenv(name, value)
        validated.append(cfg.model.virtual_pipeline_model_parallel_size)

    def _create_model(model_provider: Any, model_type: Any, pg_collection: Any) -> None: ...

    vars(module).update(runtime_config_update=runtime_config_update, validated=validated)
    vars(provider).update(_create_model=_create_model)
    monkeypatch.setitem(sys.modules, "megatron.bridge", ModuleType("megatron.bridge"))
    for each in modules.values():
        monkeypatch.setitem(sys.modules, each.__name__, each)
    for name in [name for name in os.environ if name.startswith("ZERO_BUBBLE_")]:
        monkeypatch.delenv(name)
    yield module
    bridge.revert()
    megatron.zero_bubble.revert()


def run(
    module: Any,
    env_vars: dict[str, str],
    decentralized: bool = False,
    others: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    **of_model: Any,
) -> Any:
    """Begin a run; return its configuration. ``others`` has parts of it in addition to that of the model."""
    shapes = {"seq_length": 32, "tensor_model_parallel_size": 1, "sequence_parallel": False}
    cfg = SimpleNamespace(
        env_vars=env_vars,
        model=configured(**shapes, **of_model),
        train=SimpleNamespace(micro_batch_size=1, global_batch_size=6),
        validation=SimpleNamespace(eval_iters=1),
        dist=SimpleNamespace(distributed_timeout_minutes=10, use_decentralized_pg=decentralized),
        data_parallel_size=1,
        **{name: SimpleNamespace(**options) for name, options in others.items()},
    )
    module.runtime_config_update(cfg)
    return cfg


def test_a_run_has_the_schedule_of_its_configuration(pretrain: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bridge.install()
    bridge.install()
    run(pretrain, {})
    assert not megatron.zero_bubble.report()
    run(pretrain, {"ZERO_BUBBLE_SCHEDULE": "zb-v"})
    assert pretrain.validated == [None, 2]
    assert [line.partition(":")[0].rpartition(".")[2] for line in bridge.report()] == [
        "runtime_config_update",
        "_create_model",
    ]
    assert "schedule zb-v in megatron-core" in capsys.readouterr().out


def test_the_next_run_has_its_own_schedule(pretrain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.install()
    run(pretrain, {"ZERO_BUBBLE_SCHEDULE": "zb-v"})
    monkeypatch.delenv("ZERO_BUBBLE_SCHEDULE")
    run(pretrain, {"ZERO_BUBBLE_SCHEDULE": "zb-h1"})
    assert len(bridge.report()) == 1
    assert len(megatron.zero_bubble.report()) == 6
    monkeypatch.delenv("ZERO_BUBBLE_SCHEDULE")
    run(pretrain, {})
    assert not megatron.zero_bubble.report()


def test_a_run_without_a_schedule_keeps_the_one_of_its_script(pretrain: Any) -> None:
    bridge.install()
    megatron.zero_bubble.apply("zb-h1")
    run(pretrain, {})
    assert len(megatron.zero_bubble.report()) == 6


def test_the_environment_precedes_the_configuration(pretrain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_BUBBLE_SCHEDULE", "zb-h1")
    switch_on(os.environ)  # as the import of megatron.zero_bubble.auto does
    assert len(megatron.zero_bubble.report()) == 6
    cfg = run(pretrain, {"ZERO_BUBBLE_SCHEDULE": "zb-v"})
    assert cfg.model.virtual_pipeline_model_parallel_size is None
    assert len(bridge.report()) == 1


def test_groups_without_ends_of_a_v_are_refused(pretrain: Any) -> None:
    bridge.install()
    with pytest.raises(UserError, match="got dist.use_decentralized_pg=True; set it to False, or choose"):
        run(pretrain, {"ZERO_BUBBLE_SCHEDULE": "zb-v"}, decentralized=True)
    assert not megatron.zero_bubble.report()


def test_what_the_schedule_does_itself_is_switched_off(pretrain: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    bridge.install(said.append)
    delayed = {"delay_wgrad_compute": True}
    cfg = run(pretrain, {"ZERO_BUBBLE_SCHEDULE": "zb-h1"}, others={"ddp": delayed}, **delayed)
    assert not cfg.model.delay_wgrad_compute and not cfg.ddp.delay_wgrad_compute
    assert [line for line in said if "--delay-wgrad-compute is switched off" in line] == said[-1:]


@pytest.mark.parametrize("rule", ROWS, ids=lambda rule: f"{rule.choice.words}: {rule.option}")
def test_every_row_holds_in_every_part_of_the_configuration(pretrain: Any, rule: OptionRule) -> None:
    said: list[str] = []
    bridge.install(said.append)
    chosen = {"ZERO_BUBBLE_SCHEDULE": "zb-h1"} | CHOSEN.get(rule.choice.words, {})
    for part in ("model", "ddp", "optimizer"):
        parts: dict[str, dict[str, Any]] = {"model": {}, "ddp": {}, "optimizer": {}}
        parts[part][rule.option] = unsupported(rule)
        of_model = parts.pop("model")
        if rule.choice is PAIRS:  # they need several stages, which a hybrid model has by itself
            of_model["virtual_pipeline_model_parallel_size"] = 2
        if rule.is_set:
            cfg = run(pretrain, chosen, others=parts, **of_model)
            assert getattr(getattr(cfg, part), rule.option) == rule.value and rule.why in said.pop()
        else:
            with pytest.raises(UserError, match=re.escape(f"need {rule.option}={rule.value!r}, because {rule.why}")):
                run(pretrain, chosen, others=parts, **of_model)
            assert not megatron.zero_bubble.report()


def test_overlaps_of_tensor_parallelism_are_accepted(pretrain: Any) -> None:
    """The linears switch off those that are in the way, when they are built."""
    bridge.install()
    overlaps = {"tp_comm_bulk_wgrad": True, "tp_comm_bulk_dgrad": True, "tp_comm_overlap_ag": False}
    run(pretrain, {"ZERO_BUBBLE_SCHEDULE": "zb-h1"}, tp_comm_overlap=True, **overlaps)
    assert megatron.zero_bubble.report()


def test_in_batch_packing_runs_without_slices(pretrain: Any) -> None:
    """Megatron-Bridge sets the option for in-batch packing with a pipeline."""
    bridge.install()
    run(pretrain, {"ZERO_BUBBLE_SCHEDULE": "zb-h1"}, variable_seq_lengths=True)
    assert megatron.zero_bubble.report()


def test_in_batch_packing_is_refused_with_slices(pretrain: Any) -> None:
    bridge.install()
    with pytest.raises(UserError, match="got variable_seq_lengths and schedule=seq-zb-h1; pad all"):
        run(pretrain, {"ZERO_BUBBLE_SCHEDULE": "seq-zb-h1"}, variable_seq_lengths=True)
    assert not megatron.zero_bubble.report()
