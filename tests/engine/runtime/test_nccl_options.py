"""The options of the NCCL groups for messages, and the warning that does not apply to them."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d

from megatron.zero_bubble import build
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.core.plan.nccl import MOST_KINDS, Ctas, collective_ctas
from megatron.zero_bubble.engine.runtime import groups
from megatron.zero_bubble.engine.runtime.collectives import collective_kinds
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.nccl import check_streams, options_beside_passes, without_p2p_warning
from tests.helpers.nccl import GPUs
from tests.helpers.ranks import RankPool
from tests.helpers.sources import named

UNSET = -(2**31)


@dataclass
class Config:
    """The fields of ``NCCLConfig`` that Megatron sets."""

    cga_cluster_size: int = UNSET
    min_ctas: int = UNSET
    max_ctas: int = UNSET
    net_name: str | None = None


@dataclass
class Options:
    """``ProcessGroupNCCL.Options``, which torch has only where it is built with NCCL."""

    is_high_priority_stream: bool = False
    config: Config = field(default_factory=Config)
    _timeout: timedelta = timedelta(minutes=10)


def pipeline_with(**config: Any) -> Any:
    backend = SimpleNamespace(options=Options(config=Config(**config)))
    return SimpleNamespace(_get_backend=lambda device: {"cuda": backend}[device.type])


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({}, Config(min_ctas=1, max_ctas=3)),
        ({"max_ctas": 16}, Config(max_ctas=16)),
        ({"min_ctas": 8}, Config(min_ctas=8)),
        ({"cga_cluster_size": 2, "net_name": "IB"}, Config(2, 1, 3, "IB")),
    ],
)
def test_the_jobs_own_options_take_precedence(job: dict[str, Any], expected: Config) -> None:
    options = options_beside_passes(pipeline_with(**job), 3, timedelta(minutes=2))
    assert options == Options(True, expected, timedelta(minutes=2))


@pytest.mark.usefixtures("nccl")
def test_options_of_a_wrapped_backend_are_found() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends."""
    wrapped = pipeline_with(max_ctas=16)._get_backend(torch.device("cuda"))
    pipeline: Any = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(wrapped_pg=wrapped))
    assert options_beside_passes(pipeline, 3, timedelta(minutes=2)).config.max_ctas == 16


def group_with(priority: bool | None) -> Any:
    """A group whose streams have high priority or not; None for one without a backend for GPUs."""
    if priority is None:
        return SimpleNamespace(_get_backend=mock.Mock(side_effect=RuntimeError("No backend type associated")))
    return SimpleNamespace(_get_backend=lambda _: SimpleNamespace(options=Options(priority)))


@pytest.mark.parametrize(("num_others", "refused"), [(28, False), (29, True)])
def test_communicators_that_would_share_a_stream_are_refused(
    monkeypatch: pytest.MonkeyPatch, num_others: int, refused: bool
) -> None:
    """A rank has four channels, in two groups. Groups of default priority take other streams, those of gloo none."""
    gpus = GPUs(3)
    transport = gpus.transports(frozenset({(0, 1), (1, 0), (1, 2), (2, 1)}))[1]
    of_messages = [group_with(True), group_with(True)]
    transport._directions = replace(transport._directions, groups=dict(zip((True, False), of_messages, strict=True)))
    lazy = [group_with(True) for _ in range(num_others)]
    groups_of_job = [*lazy, *of_messages, *(group_with(priority) for priority in (False, None) for _ in range(40))]
    world = SimpleNamespace(pg_map=[*groups_of_job])
    monkeypatch.setattr(distributed_c10d, "_world", world)
    with pytest.raises(UserError, match="got 4 for messages .* and 29 of other") if refused else nullcontext():
        transport.check_streams()


def test_gloo_takes_no_streams(ranks: RankPool) -> None:
    ranks.run(2, check_streams_of_gloo)


def check_streams_of_gloo(_rank: int) -> None:
    assert torch.distributed.group.WORLD is not None
    check_streams(32, [])
    with pytest.raises(UserError, match="got 33 for messages between stages and 0 of other process groups"):
        check_streams(33, [])


def vocabulary_plan(name: str = "zb-h1", algorithm: Algorithm = 1) -> Plan:
    return plan_of(named(name, 4, vocabulary=algorithm).make(4))


@pytest.mark.parametrize(
    ("num_multiprocessors", "expected"), [(None, 8), (132, 8), (128, 8), (66, 3), (33, 1), (30, 1)]
)
def test_collectives_leave_half_of_the_multiprocessors_to_passes(
    num_multiprocessors: int | None, expected: int
) -> None:
    """A rank in the middle has four channels of two CTAs; 33 multiprocessors are a quarter of an H200."""
    said: list[str] = []
    assert collective_ctas(Ctas(), vocabulary_plan(), num_multiprocessors, said.append) == expected
    assert bool(said) == (expected < 8)
    assert num_multiprocessors is None or MOST_KINDS * expected + 8 <= num_multiprocessors / 2


def test_gpus_that_are_too_small_for_collectives_are_refused() -> None:
    with pytest.raises(
        UserError, match="got 28 multiprocessors, 8 CTAs for messages and 7 kinds of collectives; lower"
    ):
        collective_ctas(Ctas(), vocabulary_plan(), 28)
    assert collective_ctas(Ctas(message=1), vocabulary_plan(), 28) == 1
    assert collective_ctas(Ctas(), plan_of(build("zb-h1", num_ranks=4, num_microbatches=4)), 8) == 8


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "interleaved-1f1b"])
def test_no_plan_has_more_kinds_of_collectives(name: str) -> None:
    for algorithm in (1, 2):
        assert len(collective_kinds(vocabulary_plan(name, algorithm))) <= MOST_KINDS


def made_groups(
    monkeypatch: pytest.MonkeyPatch, backend: str, *arguments: Any, of_pipeline: str | None = None
) -> list[dict[str, Any]]:
    """The options with which ``Directions`` creates process groups for the channels between two ranks.

    Args:
        of_pipeline: torch's name of the pipeline's backend, if it is not ``backend``.
    """
    made: list[dict[str, Any]] = []

    def new_group(ranks: list[int], **options: Any) -> str:
        assert sorted(ranks) == [4, 7]
        made.append(options)
        return f"group {len(made)}"

    fake = SimpleNamespace(
        new_group=new_group,
        get_backend=lambda _: of_pipeline or backend,
        get_process_group_ranks=lambda _: [7, 4],
        get_world_size=lambda: 2,
        all_gather_object=lambda wanted, own: wanted.__setitem__(slice(None), [own, own]),
        group=SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=None, _get_backend=lambda _: None)),
    )
    monkeypatch.setattr(groups, "dist", fake)
    pipeline = pipeline_with()
    pipeline.rank = lambda: 1
    directions = Directions.of(pipeline, *arguments)
    directions.open([(0, 1), (1, 0)])
    assert (directions.rank, directions.backend) == (1, backend)
    assert directions.device == ("cpu" if backend == "gloo" else "cuda")
    # torch sorts the ranks of a group, so pipeline rank 0 has rank 1 there.
    assert [directions.route(channel) for channel in ((0, 1), (1, 0))] == [("group 1", 1), ("group 2", 1)]
    return made


@pytest.mark.usefixtures("nccl")
def test_the_groups_of_channels_get_options_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = made_groups(monkeypatch, "nccl", timedelta(minutes=2), 5)
    assert up["pg_options"].config == Config(min_ctas=1, max_ctas=5)
    assert up == down
    assert up["pg_options"] is not down["pg_options"], "torch writes the name of a group into its options"
    assert up["timeout"] == up["pg_options"]._timeout == timedelta(minutes=2), "otherwise torch warns"
    by_default, _ = made_groups(monkeypatch, "nccl")
    assert by_default["pg_options"].config == Config(), "without a limit, NCCL's default applies"
    assert by_default["timeout"] == timedelta(minutes=10)


@pytest.mark.usefixtures("nccl")
@pytest.mark.filterwarnings("ignore:Device capability of")  # in versions of torch that do not know the name
@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-lazy", "nccl-legacy"])
def test_all_names_of_nccl_get_the_same_options(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    expected = made_groups(monkeypatch, "nccl", timedelta(minutes=2), 5)
    for name in (backend, f"cpu:gloo,cuda:{backend}", f"cuda:{backend},cpu:gloo"):
        found = made_groups(monkeypatch, backend, timedelta(minutes=2), 5, of_pipeline=name)
        assert found == [{**options, "backend": backend} for options in expected]


def test_ranks_without_gpus_may_name_gloo_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made_groups(monkeypatch, "gloo", of_pipeline="cpu:gloo") == made_groups(monkeypatch, "gloo")


def test_gloo_gets_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in made_groups(monkeypatch, "gloo", None, 5):
        assert made == {"timeout": None, "backend": "gloo", "pg_options": None, "group_desc": "zero-bubble"}


def warnings_of_the_first_transfers(_rank: int) -> list[str]:
    """Warn as torch does, from Python and, with another text, from C++."""

    def call() -> None:
        warnings.warn("An unbatched P2P op (send/recv) was called on this ProcessGroup with size 2.", stacklevel=1)
        warnings.warn("another warning", stacklevel=1)
        torch._C._jit_set_nvfuser_enabled(False)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch._C._jit_set_nvfuser_enabled(False)
        assert caught == [], "C++ prints its warnings, which Python cannot filter"
        without_p2p_warning(call)
    return [str(warning.message).split(" (Triggered")[0] for warning in caught]


def test_only_the_warning_of_point_to_point_operations_is_hidden(ranks: RankPool) -> None:
    ((first, second),) = ranks.run(1, warnings_of_the_first_transfers)
    assert first == "another warning"
    assert second.startswith("nvfuser is no longer supported")


def test_errors_pass_through() -> None:
    def fail() -> None:
        raise ValueError("a reason")

    with pytest.raises(ValueError, match="a reason"):
        without_p2p_warning(fail)


def test_transports_open_their_channels_without_the_warning() -> None:
    with mock.patch("megatron.zero_bubble.engine.runtime.transport.without_p2p_warning") as opens:
        opens.side_effect = without_p2p_warning
        GPUs(1).transports(frozenset())
    assert opens.call_count == 1
