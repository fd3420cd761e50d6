"""A hanging peer is named with rank, pass and channel, on both ends of a channel."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from megatron.zero_bubble.core.ir import Message, Pass, Value
from tests.helpers.ranks import RankPool

FORWARD = Message(Value(Pass.parse("0F3")), 0, 1)
BACKWARD = Message(Value(Pass.parse("1B2")), 1, 0)


def wait_for_a_silent_peer(rank: int) -> str | None:
    from megatron.zero_bubble.core.errors import PeerError
    from megatron.zero_bubble.engine.runtime.groups import Directions
    from megatron.zero_bubble.engine.runtime.transport import Transport

    transport = Transport(Directions.of(torch.distributed.group.WORLD, timedelta(seconds=1)), [(0, 1), (1, 0)])
    torch.distributed.barrier()
    if rank == 1:
        torch.distributed.barrier()
        return None
    receive = transport.post(BACKWARD, torch.empty(4))
    with pytest.raises(PeerError) as raised:
        receive.wait(Pass.parse("0B2"))
    torch.distributed.barrier()
    return str(raised.value)


def test_receive_timeout_names_peer_pass_and_channel(ranks: RankPool) -> None:
    text, _ = ranks.run(2, wait_for_a_silent_peer)
    assert text.startswith(
        "pipeline rank 0 could not run 0B2: the output of 1B2 did not arrive from pipeline rank 1 on channel 1>0 ("
    )
    assert text.endswith("; rank 1 has failed or hangs: look at its output first")
    assert "imed out" in text


def deliver_to_a_silent_peer(rank: int) -> tuple[str, int] | None:
    from megatron.zero_bubble.core.errors import PeerError
    from megatron.zero_bubble.engine.runtime.groups import Directions
    from megatron.zero_bubble.engine.runtime.transport import Transport

    transport = Transport(Directions.of(torch.distributed.group.WORLD, timedelta(seconds=1)), [(0, 1), (1, 0)])
    torch.distributed.barrier()
    if rank == 1:
        torch.distributed.barrier()
        return None
    transport.send(FORWARD, torch.ones(4))
    assert transport.num_in_flight == 1
    with pytest.raises(PeerError) as raised:
        transport.settle(FORWARD)
    torch.distributed.barrier()
    return str(raised.value), transport.num_in_flight


def test_send_timeout_names_peer_pass_and_channel(ranks: RankPool) -> None:
    (text, in_flight), _ = ranks.run(2, deliver_to_a_silent_peer)
    assert text.startswith("pipeline rank 0 could not deliver the output of 0F3 to pipeline rank 1 on channel 0>1 (")
    assert text.endswith("; rank 1 has failed or hangs: look at its output first")
    assert in_flight == 0


@pytest.mark.parametrize(
    ("text", "reason", "silent"),
    [
        (
            "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:385. This is typically",
            "Connection closed by peer [10.0.0.7]:385",
            False,
        ),
        (
            "[/build/gloo/x.cc:9] Read error [::1]:1: Connection reset by peer",
            "Read error [::1]:1: Connection reset by peer",
            False,
        ),
        (
            "Timed out waiting 1000ms for recv operation to complete",
            "Timed out waiting 1000ms for recv operation to complete",
            True,
        ),
        ("mat1 and mat2 shapes cannot be multiplied", None, False),
        ("", None, False),
    ],
)
def test_errors_of_gloo_are_recognized(ranks: RankPool, text: str, reason: str | None, silent: bool) -> None:
    assert ranks.run(1, recognized, text) == [(reason, silent)]


def recognized(rank: int, text: str) -> tuple[str | None, bool]:
    """The reason, and whether the peer is silent."""
    from megatron.zero_bubble.core.errors import PeerError
    from megatron.zero_bubble.engine.runtime.transport import is_silent, lost_connection

    error = PeerError("no message came")
    error.__cause__ = RuntimeError(text)
    return lost_connection(RuntimeError(text)), is_silent(error)


def bound_devices(_rank: int) -> tuple[list[object], object]:
    """Return the device of the default group during each creation of a group, and afterwards."""
    from unittest import mock

    from megatron.zero_bubble.engine.runtime.groups import Directions
    from megatron.zero_bubble.engine.runtime.transport import Transport

    dist = torch.distributed
    seen, create, world = [], dist.new_group, dist.group.WORLD

    def new_group(*args: object, **options: object) -> object:
        seen.append(world.bound_device_id)
        return create(*args, **options)

    world.bound_device_id = torch.device("cpu", 0)
    try:
        with mock.patch.object(dist, "new_group", new_group):
            Transport(Directions.of(world), [(0, 1)]).close()
        return seen, world.bound_device_id
    finally:
        world.bound_device_id = None


def test_groups_create_their_communicators_lazily(ranks: RankPool) -> None:
    """Also in a job that has bound its process group to a device, for which torch creates them eagerly."""
    for seen, afterwards in ranks.run(2, bound_devices):
        assert seen == [None, None]
        assert afterwards == torch.device("cpu", 0)
