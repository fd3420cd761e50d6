"""Shards in symmetric memory, on threads with a stand-in for the memory: what is fetched, and sums in rank order."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.runtime import symmetric
from megatron.zero_bubble.engine.runtime.symmetric import SymmetricExchange, check_hosts
from tests.helpers.ranks import RankPool

SIZE, KEYS, COUNTS = 5, ((0, 0), (3, 0)), (4, 1, 2)


class Node:
    """Memory of several ranks; allocations belong together by their order, as in torch."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=20)
        self.allocated: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self.rank: Callable[[], int] = lambda: rank
        self.size: Callable[[], int] = lambda: size


class Handle:
    def __init__(self, node: Node, number: int) -> None:
        self._node, self._number = node, number

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        self._node.barrier.wait()

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Any:
        tensor = self._node.allocated[rank][self._number]
        assert (tuple(tensor.shape), tensor.dtype, storage_offset) == (sizes, dtype, 0)
        return tensor


class Memory:
    """The stand-in for ``torch.distributed._symmetric_memory`` on one rank."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(size, float("nan"), dtype=dtype, device=device)

    def rendezvous(self, tensor: torch.Tensor, group: Group) -> Handle:
        own = self._node.allocated[group.rank()]
        own.append(tensor)
        self._node.barrier.wait()
        return Handle(self._node, len(own) - 1)


def part(iteration: int, source: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * iteration + 10 * source + number)
    return torch.randn(SIZE, generator=generator) * 10.0 ** (3 * source)


def expected(iteration: int) -> torch.Tensor:
    total = torch.zeros(SIZE)
    for source, count in enumerate(COUNTS):
        own = torch.zeros(SIZE)
        for number in range(count):
            own += part(iteration, source, number)
        total += own
    return total


def exchange_at_random_times(rank: int, node: Node, seed: int) -> None:
    exchange, chance = SymmetricExchange(Group(rank, len(COUNTS)), Memory(node)), random.Random(10 * seed + rank)  # type: ignore[arg-type]
    for iteration in range(3):
        shards = {
            key: torch.full((SIZE,), 100.0 * iteration + 10 * rank + key[0], dtype=torch.bfloat16) for key in KEYS
        }
        exchange.publish(shards, dict.fromkeys(KEYS, torch.float32))
        for number in range(COUNTS[rank]):
            for key in KEYS:
                for replica in range(exchange.size):
                    time.sleep(chance.random() * 0.003)
                    into = torch.empty(SIZE, dtype=torch.bfloat16)
                    exchange.fetch(key, replica, into)
                    own = torch.full((SIZE,), 100.0 * iteration + 10 * replica + key[0], dtype=torch.bfloat16)
                    assert torch.equal(into, own)
                    exchange.add(key, replica, part(iteration, rank, number))
        sums = exchange.end()
        assert all(torch.equal(sums[key], expected(iteration)) for key in KEYS)
    exchange.close()


def test_sums_have_the_same_bits_whatever_arrives_first() -> None:
    for seed in range(2):
        node = Node(len(COUNTS))
        with ThreadPoolExecutor(len(COUNTS)) as pool:
            runs = [pool.submit(exchange_at_random_times, rank, node, seed) for rank in range(len(COUNTS))]
            for run in runs:
                run.result()


def test_torch_has_the_functions_of_the_stand_in() -> None:
    from torch.distributed import _symmetric_memory

    for name in ("empty", "rendezvous"):
        assert callable(getattr(_symmetric_memory, name))
    for name, arguments in (("get_buffer", r"rank: .*sizes: .*dtype: "), ("barrier", r"channel: .*timeout_ms: ")):
        assert re.search(arguments, getattr(_symmetric_memory._SymmetricMemory, name).__doc__)


def check_on(rank: int, hosts: list[str], backend: str | None) -> str:
    """Check the hosts with replicas in pairs of ranks; return the error of this rank."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric.socket, "gethostname", lambda: hosts[rank])
        try:
            check_hosts(pairs[rank // 2], backend)
        except UserError as error:
            return str(error)
        finally:
            for pair in pairs:
                dist.destroy_process_group(pair)
    return ""


@pytest.mark.parametrize(
    ("hosts", "backend", "refused"),
    [
        (["a", "a", "b", "b"], "CUDA", False),  # pipelines over hosts
        (["a", "a", "b", "c"], "NVSHMEM", False),
        (["a", "a", "b", "c"], "CUDA", True),
        (["a", "a", "b", "c"], None, True),
    ],
)
def test_replicas_on_several_hosts_are_refused_on_every_rank(
    ranks: RankPool, hosts: list[str], backend: str | None, refused: bool
) -> None:
    errors = ranks.run(4, check_on, hosts, backend)
    assert len(set(errors)) == 1
    assert (
        f"got the data-parallel replicas of ranks [2, 3] on b, c with the backend {backend}" in errors[0]
    ) is refused


def test_hosts_are_checked_before_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own name of the backend."""
    from torch.distributed import _symmetric_memory

    from megatron.zero_bubble.integration.adapter import on_demand

    seen = []
    monkeypatch.setattr(on_demand.parallel_state, "get_data_parallel_group", lambda **_: Group(0, 2))
    monkeypatch.setattr(on_demand, "backend_of", lambda _: "nccl")
    monkeypatch.setattr(_symmetric_memory, "get_backend", {"cuda": "CUDA"}.__getitem__, raising=False)
    monkeypatch.setattr(on_demand, "check_hosts", lambda group, backend: seen.append((group.size(), backend)))
    exchange = on_demand.OnDemand()
    exchange.connect(None, has_experts=False)  # type: ignore[arg-type]
    assert seen == [(2, "CUDA")]
    exchange.close()
