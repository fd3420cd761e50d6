"""Shards on demand: what is fetched, sums in rank order however late parts arrive, and a replica that dies."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

from megatron.zero_bubble.engine.runtime.on_demand import ShardExchange
from tests.helpers.ranks import RankPool

SIZE, KEYS, COUNTS = 5, ((0, 0), (0, 1), (3, 0)), (4, 1, 2)


def part(iteration: int, source: int, number: int, key: tuple[int, int]) -> torch.Tensor:
    """What a replica adds; so large and so small that the order of additions decides about the bits."""
    generator = torch.Generator().manual_seed(1000 * iteration + 100 * source + 10 * number + sum(key))
    return torch.randn(SIZE, generator=generator) * 10.0 ** (3 * source)


def expected(iteration: int, key: tuple[int, int]) -> torch.Tensor:
    total = None
    for number in range(max(COUNTS)):
        for source, count in enumerate(COUNTS):
            if number < count:
                own = part(iteration, source, number, key)
                total = own if total is None else total + own
    assert total is not None
    return total


def exchange_at_random_times(rank: int, seed: int) -> list[list[list[float]]]:
    """Three iterations in which the replicas fetch and add unequally often; returns the sums of this rank."""
    group = dist.group.WORLD
    assert group is not None
    exchange, chance, found = ShardExchange(group), random.Random(seed * 10 + rank), []
    for iteration in range(3):
        shards = {key: torch.full((SIZE,), 100.0 * iteration + 10 * rank + key[0] + key[1]) for key in KEYS}
        time.sleep(chance.random() * 0.02)
        exchange.publish(shards, dict.fromkeys(KEYS, torch.float32))
        for number in range(COUNTS[rank]):
            for key in KEYS:
                for replica in range(exchange.size):
                    time.sleep(chance.random() * 0.003)
                    if replica != rank:
                        into = torch.empty(SIZE)
                        exchange.fetch(key, replica, into)
                        assert into.tolist() == [100.0 * iteration + 10 * replica + key[0] + key[1]] * SIZE
                    exchange.add(key, replica, part(iteration, rank, number, key))
        sums = exchange.end()
        assert not any(thread.is_alive() for thread in exchange._threads), "it could abort the process at its end"
        for key in KEYS:
            assert torch.equal(sums[key], expected(iteration, key))
        found.append([sums[key].tolist() for key in KEYS])
    exchange.close()
    return found


def test_sums_have_the_same_bits_whatever_arrives_first(ranks: RankPool) -> None:
    runs = [ranks.run(3, exchange_at_random_times, seed, timeout=60) for seed in range(2)]
    assert runs[0] == runs[1]
