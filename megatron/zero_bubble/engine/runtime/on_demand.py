"""Shards of data-parallel replicas on demand, by point-to-point messages instead of collectives.

A replica fetches the shards of the others when it needs them, and sends each of them its part of a gradient when that
is complete. A thread per replica answers, so no replica waits for the others to reach the same point, and their plans
may differ. This is the communication of ODC (arXiv 2601.19362), with sums in the order of the ranks, so that a run
repeats bit for bit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import PeerError
from megatron.zero_bubble.engine.runtime.groups import new_group
from megatron.zero_bubble.engine.runtime.transport import blaming_peers

ShardKey = tuple[int, int]
"""A stage, and the number of one of its shards."""
_FETCH, _ADD, _END = range(3)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REQUEST, _ANSWER = range(2)
"""Tags of messages."""


class ShardExchange:
    """The shards of this rank, which the other replicas of its stages fetch and add to. For gloo.

    The constructor is a collective call of all ranks of the job. Methods are called from one thread at a time, in every
    iteration ``publish`` first and ``end`` last.

    Args:
        group: the replicas.
        timeout: how long a message may take before its replica is considered dead; None for the job's.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        self._members = dist.get_process_group_ranks(group)
        self._group = new_group(self._members, "gloo", timeout)
        # torch.distributed sorts the ranks of a new group.
        self._peers = [dist.get_group_rank(self._group, member) for member in self._members]
        self.rank, self.size = group.rank(), group.size()
        self._others = [replica for replica in range(self.size) if replica != self.rank]
        self._lock = threading.Lock()
        self._shards: Mapping[ShardKey, torch.Tensor] = {}
        self._sums: dict[ShardKey, _Sum] = {}
        self._ended: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._lost: RuntimeError | None = None

    def publish(self, shards: Mapping[ShardKey, torch.Tensor], dtypes: Mapping[ShardKey, torch.dtype]) -> None:
        """Begin an iteration with these shards of weights, which must not change until its end.

        A replica that begins earlier waits for this one with its first request.

        Args:
            dtypes: those of the gradients; here, parts may have any.
        """
        self._shards, self._sums, self._ended = shards, {}, set()
        self._threads = [threading.Thread(target=self._serve, args=(other,), daemon=True) for other in self._others]
        for thread in self._threads:
            thread.start()

    def fetch(self, key: ShardKey, replica: int, into: torch.Tensor) -> None:
        """Fill ``into``, which is contiguous, with a shard of another replica.

        Raises:
            RuntimeError: the replica died.
        """
        self._ask(_FETCH, key, replica)
        self._group.recv([into], self._peers[replica], _ANSWER).wait()

    def add(self, key: ShardKey, replica: int, part: torch.Tensor) -> None:
        """Add ``part``, which is contiguous, to the sum of a replica, which may be this one.

        Raises:
            RuntimeError: the replica died.
        """
        if replica == self.rank:
            self._receive(key, replica, part.clone())
            return
        self._ask(_ADD, key, replica, part.numel(), _DTYPES.index(part.dtype))
        self._group.send([part], self._peers[replica], _REQUEST).wait()

    def end(self) -> dict[ShardKey, torch.Tensor]:
        """End the iteration when all replicas have ended it; returns the sums of this rank that anyone has added to.

        Raises:
            PeerError: a replica died.
        """
        with blaming_peers(_not_ended):
            for replica in self._others:
                self._ask(_END, (0, 0), replica)
            self._end(self.rank)
            for thread in self._threads:
                thread.join()
            if self._lost is not None:
                raise self._lost
        return {key: own.total for key, own in self._sums.items()}

    def close(self) -> None:
        """Disconnect from the other replicas, unless one died during an iteration."""
        if dist.is_initialized() and not any(thread.is_alive() for thread in self._threads):
            dist.destroy_process_group(self._group)

    def _ask(self, request: int, key: ShardKey, replica: int, *more: int) -> None:
        head = torch.tensor([request, *key, *(more or (0, 0))])
        self._group.send([head], self._peers[replica], _REQUEST).wait()

    def _serve(self, replica: int) -> None:
        """Answer the requests of a replica, until it ends the iteration or dies."""
        peer, head = self._peers[replica], torch.empty(5, dtype=torch.int64)
        try:
            while replica not in self._ended:
                self._group.recv([head], peer, _REQUEST).wait()
                request, stage, number, size, dtype = head.tolist()
                if request == _FETCH:
                    self._group.send([self._shards[stage, number]], peer, _ANSWER).wait()
                elif request == _ADD:
                    part = torch.empty(size, dtype=_DTYPES[dtype])
                    self._group.recv([part], peer, _REQUEST).wait()
                    self._receive((stage, number), replica, part)
                else:
                    self._end(replica)
        except RuntimeError as error:
            self._lost = error

    def _receive(self, key: ShardKey, replica: int, part: torch.Tensor) -> None:
        with self._lock:
            own = self._sums.setdefault(key, _Sum(self.size))
            own.put(replica, part)
            own.add_complete(self._ended)

    def _end(self, replica: int) -> None:
        with self._lock:
            self._ended.add(replica)
            for own in self._sums.values():
                own.add_complete(self._ended)


class _Sum:
    """A sum over replicas, and what has arrived of it: first parts are added first, each round in rank order.

    Attributes:
        total: the sum so far.
    """

    total: torch.Tensor

    def __init__(self, num_replicas: int) -> None:
        self._arrived: Sequence[deque[torch.Tensor]] = [deque() for _ in range(num_replicas)]
        self._is_empty = True

    def put(self, replica: int, part: torch.Tensor) -> None:
        """Take a part; those of a replica arrive in order."""
        self._arrived[replica].append(part)

    def add_complete(self, ended: Collection[int]) -> None:
        """Add the rounds for which nothing is missing, because it has arrived, or its replica has ended."""
        while any(self._arrived) and all(parts or number in ended for number, parts in enumerate(self._arrived)):
            for parts in self._arrived:
                if parts:
                    self._add(parts.popleft())

    def _add(self, part: torch.Tensor) -> None:
        if self._is_empty:
            self.total, self._is_empty = part, False
        else:
            self.total.add_(part)


def _not_ended(reason: str) -> PeerError:
    return PeerError(
        f"not all data-parallel replicas ended the iteration ({reason}); a rank has failed or hangs: look for the "
        "first error of the other ranks"
    )
