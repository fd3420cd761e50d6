"""Tests of arguments of the forward-backward function that our schedules do not support."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from megatron.core import process_groups_config

from megatron.zero_bubble import build
from megatron.zero_bubble.core.errors import PlanError, UserError
from megatron.zero_bubble.core.ir import Op
from megatron.zero_bubble.core.plan import Additions, plan_of, plan_of_evaluation
from megatron.zero_bubble.integration.adapter import connection, pipeline, prepared
from megatron.zero_bubble.integration.adapter.pipeline import Pipeline
from megatron.zero_bubble.integration.patching.apply import _pipeline
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig


class Several:
    """Imitates megatron-core's process groups of several models, which exist since 0.19."""


@pytest.mark.parametrize(
    ("argument", "what"),
    [
        ({"p2p_communicator": object()}, "a p2p_communicator of type object"),
        ({"pg_collection": Several()}, "a Several"),
    ],
)
def test_several_models_are_rejected(monkeypatch: pytest.MonkeyPatch, argument: dict[str, Any], what: str) -> None:
    monkeypatch.setattr(process_groups_config, "MultiModuleProcessGroupCollection", Several, raising=False)

    def make_schedule(num_ranks: int, num_microbatches: int) -> Any:
        raise AssertionError("no schedule must be built")

    with pytest.raises(UserError, match=f"support one model per pipeline .*; got {what}, which is for several models"):
        Pipeline(make_schedule).forward_backward(
            forward_step_func=print,
            data_iterator=None,
            model=None,
            num_microbatches=2,
            seq_length=8,
            micro_batch_size=1,
            **argument,
        )


def configured(**options: Any) -> Pipeline:
    config = ZeroBubbleConfig("zb-h1", **options)
    return _pipeline(config, config.sources(), (), print)


@pytest.mark.parametrize("forward_only", [False, True])
def test_configuration_says_when_receives_are_posted(forward_only: bool) -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=4)

    def ops(**options: Any) -> list[tuple[Op, ...]]:
        return list(configured(**options)._plan(schedule, (), forward_only).ops)

    lower = plan_of_evaluation if forward_only else plan_of
    assert ops(post_receives="late") == list(lower(schedule, Additions("late")).ops)
    assert ops() == list(lower(schedule, Additions("early")).ops) != ops(post_receives="late")
    with_headers = configured()._plan(schedule, (), forward_only, needs_headers=True)
    assert list(with_headers.ops) == ops(post_receives="late")


def test_configuration_says_what_the_process_groups_get(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def of(*arguments: Any) -> None:
        raise Reached(*arguments[1:])

    def gather(found: list[Any], own: Any, group: Any) -> None:
        found[:] = [own] * len(found)

    monkeypatch.setattr(connection.Directions, "of", of)
    monkeypatch.setattr(prepared.dist, "all_gather_object", gather)
    group: Any = SimpleNamespace(size=lambda: 2)
    plan = plan_of(build("zb-h1", num_ranks=2, num_microbatches=2))
    with pytest.raises(Reached) as reached:
        configured(nccl_ctas=7, peer_timeout_s=30.0)._connect(group, plan)
    assert reached.value.args == (timedelta(seconds=30), 7)


def test_one_watchdog_follows_messages_and_all_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, mock.Mock] = {}
    for name in ("Directions", "Transport", "Lanes", "Staging", "Watchdog", "select"):
        made[name] = mock.Mock()
        monkeypatch.setattr(connection, name, made[name])
    monkeypatch.setattr(pipeline, "check_same_plan", mock.Mock())
    made["Directions"].of.return_value = SimpleNamespace(backend="nccl", device="cpu")
    connected, part = configured(vocabulary=1, nccl_ctas=7, nccl_collective_ctas=5), mock.Mock()
    connected._parts = (part,)
    plan = plan_of(build("zb-h1", num_ranks=2, num_microbatches=2))
    connected._connect(SimpleNamespace(size=lambda: 2), plan)  # type: ignore[arg-type]
    watchdog = made["Watchdog"].return_value
    assert made["Transport"].call_args.args[-1] is watchdog
    assert made["Lanes"].call_args.args[-2:] == (5, watchdog)
    assert part.connect.call_args.args[0].watchdog is watchdog
    watchdog.start.assert_called_once_with()


@pytest.mark.parametrize("variable", ["CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"])
@pytest.mark.parametrize("backend", ["nccl", "nccl2", "cpu:gloo,cuda:nccl"])
def test_plans_that_need_several_queues_are_refused_where_transfers_start_in_one_order(
    monkeypatch: pytest.MonkeyPatch, backend: str, variable: str
) -> None:
    plan, group = plan_of(build("breadth-first", num_ranks=4, num_microbatches=16)), mock.Mock()
    for name, value in {"CUDA_DEVICE_MAX_CONNECTIONS": "32", variable: "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(prepared, "backend_of", lambda _: backend)
    with pytest.raises(PlanError, match=f"{variable} is 1.*; set it to .*, or choose another schedule"):
        prepared.check_queues(group, plan)
    monkeypatch.setattr(prepared, "backend_of", lambda _: "gloo")
    prepared.check_queues(group, plan)
    monkeypatch.setattr(prepared, "backend_of", lambda _: backend)
    monkeypatch.delenv(variable)
    prepared.check_queues(group, plan)


@pytest.mark.parametrize("divides", ["tensor_model", "context"])
def test_the_remedy_for_one_queue_is_one_that_megatron_allows(monkeypatch: pytest.MonkeyPatch, divides: str) -> None:
    """Where layers are divided, Megatron-LM starts with one queue only on GPUs before Blackwell."""
    plan, group = plan_of(build("breadth-first", num_ranks=4, num_microbatches=16)), mock.Mock()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    monkeypatch.setattr(prepared, "backend_of", lambda _: "nccl")
    of_two = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(prepared.parallel_state, f"get_{divides}_parallel_group", lambda check_initialized: of_two)
    with pytest.raises(PlanError, match=r"; set it to 32 on Blackwell or later \(before, Megatron-LM wants 1 with "):
        prepared.check_queues(group, plan)
