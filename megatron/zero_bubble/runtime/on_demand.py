"""Shards of data-parallel replicas on demand, by point-to-point messages instead of collectives.

A replica fetches the shards of the others when it needs them, and sends each of them its part of a gradient when that
is complete. A thread per replica answers, so nobody waits until the others reach the same point: replicas may run
different plans. This is the communication of ODC (arXiv 2601.19362), with sums in the order of the ranks, so that a run
repeats bit for bit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.zero_bubble.errors import PeerError
from megatron.zero_bubble.runtime.groups import new_group
from megatron.zero_bubble.runtime.transport import lost_connection

Key = tuple[int, int]
"""A stage, and the number of one of its shards."""
_FETCH, _ADD, _END, _STOP = range(4)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REQUEST, _ANSWER = range(2)
"""Tags of messages."""
_IDLE = timedelta(days=365)
"""A replica may ask for nothing as long as it evaluates or saves. If it dies, its connections are closed."""


class Exchange:
    """The shards of this rank, which the other replicas of its stages fetch and add to. For gloo.

    The constructor and ``close`` are collective calls of all ranks of the job. Methods are called from one thread at a
    time, in every iteration ``publish`` first and ``end`` last.

    Args:
        group: the replicas.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._members = dist.get_process_group_ranks(group)
        self._group = new_group(self._members, "gloo", _IDLE)
        # torch.distributed sorts the ranks of a new group.
        self._peers = [dist.get_group_rank(self._group, member) for member in self._members]
        self.rank, self.size = group.rank(), group.size()
        self._changed = threading.Condition()
        self._iteration = 0
        self._shards: Mapping[Key, torch.Tensor] = {}
        self._sums: dict[tuple[int, Key], _Sum] = {}
        self._ended: set[tuple[int, int]] = set()
        self._lost: RuntimeError | None = None
        others = [replica for replica in range(self.size) if replica != self.rank]
        self._threads = [threading.Thread(target=self._serve, args=(replica,), daemon=True) for replica in others]
        for thread in self._threads:
            thread.start()

    def publish(self, shards: Mapping[Key, torch.Tensor], dtypes: Mapping[Key, torch.dtype]) -> None:
        """Begin an iteration with these shards of weights, which must not change until the next one.

        Args:
            dtypes: those of the gradients; here, parts may have any.
        """
        with self._changed:
            self._iteration += 1
            self._shards = shards
            self._changed.notify_all()

    def fetch(self, key: Key, replica: int, into: torch.Tensor) -> None:
        """Fill ``into``, which is contiguous, with a shard of another replica.

        Raises:
            RuntimeError: the replica died.
        """
        self._ask(_FETCH, key, replica)
        self._group.recv([into], self._peers[replica], _ANSWER).wait()

    def add(self, key: Key, replica: int, part: torch.Tensor) -> None:
        """Add ``part``, which is contiguous, to the sum of a replica, which may be this one.

        Raises:
            RuntimeError: the replica died.
        """
        if replica == self.rank:
            self._receive(self._iteration, key, replica, part.clone())
            return
        self._ask(_ADD, key, replica, part.numel(), _DTYPES.index(part.dtype))
        self._group.send([part], self._peers[replica], _REQUEST).wait()

    def end(self) -> dict[Key, torch.Tensor]:
        """End the iteration when all replicas have ended it; returns the sums of this rank that anyone has added to.

        Raises:
            PeerError: a replica died.
        """
        iteration = self._iteration
        try:
            for replica in range(self.size):
                if replica != self.rank:
                    self._ask(_END, (0, 0), replica)
            self._end(iteration, self.rank)
            with self._changed:
                self._changed.wait_for(lambda: self._lost or self._has_ended(iteration))
                if self._lost is not None:
                    raise self._lost
                done = [(number, key) for number, key in self._sums if number == iteration]
                self._ended = {ended for ended in self._ended if ended[0] > iteration}
                return {key: self._sums.pop((number, key)).total for number, key in done}
        except RuntimeError as error:
            reason = lost_connection(error)
            if reason is None:
                raise
            raise PeerError(
                f"not all data-parallel replicas ended the iteration ({reason}); a rank has died or hangs: look for "
                "the first error of the other ranks"
            ) from error

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the threads. After an error, they are left as they are."""
        if self._lost is not None or not dist.is_initialized():
            return
        sent = [self._send(_STOP, (0, 0), replica) for replica in range(self.size) if replica != self.rank]
        for thread in self._threads:
            thread.join(timeout_s)
        del sent
        if not any(thread.is_alive() for thread in self._threads):
            dist.destroy_process_group(self._group)

    def _send(self, request: int, key: Key, replica: int, *more: int) -> tuple[dist.Work, torch.Tensor]:
        head = torch.tensor([request, self._iteration, *key, *(more or (0, 0))])
        return self._group.send([head], self._peers[replica], _REQUEST), head

    def _ask(self, request: int, key: Key, replica: int, *more: int) -> None:
        work, _head = self._send(request, key, replica, *more)
        work.wait()

    def _serve(self, replica: int) -> None:
        """Answer the requests of a replica, until it stops or dies."""
        peer, head = self._peers[replica], torch.empty(6, dtype=torch.int64)
        try:
            while True:
                self._group.recv([head], peer, _REQUEST).wait()
                request, iteration, *numbers = head.tolist()
                key, (size, dtype) = (numbers[0], numbers[1]), numbers[2:]
                if request == _STOP:
                    return
                if request == _FETCH:
                    self._group.send([self._shard(iteration, key)], peer, _ANSWER).wait()
                elif request == _ADD:
                    part = torch.empty(size, dtype=_DTYPES[dtype])
                    self._group.recv([part], peer, _REQUEST).wait()
                    self._receive(iteration, key, replica, part)
                else:
                    self._end(iteration, replica)
        except RuntimeError as error:
            with self._changed:
                self._lost = error
                self._changed.notify_all()

    def _shard(self, iteration: int, key: Key) -> torch.Tensor:
        """The shard of an iteration, which another replica may begin earlier than this rank."""
        with self._changed:
            self._changed.wait_for(lambda: self._iteration >= iteration)
            return self._shards[key]

    def _receive(self, iteration: int, key: Key, replica: int, part: torch.Tensor) -> None:
        with self._changed:
            own = self._sums.setdefault((iteration, key), _Sum(self.size))
            own.put(replica, part, lambda other: (iteration, other) in self._ended)

    def _end(self, iteration: int, replica: int) -> None:
        with self._changed:
            self._ended.add((iteration, replica))
            for (number, _), own in self._sums.items():
                if number == iteration:
                    own.add_complete(lambda other: (iteration, other) in self._ended)
            self._changed.notify_all()

    def _has_ended(self, iteration: int) -> bool:
        return all((iteration, replica) in self._ended for replica in range(self.size))


class _Sum:
    """A sum over replicas, and what has arrived of it: first parts are added first, each round in rank order.

    Attributes:
        total: the sum so far.
    """

    total: torch.Tensor

    def __init__(self, num_replicas: int) -> None:
        self._arrived: Sequence[deque[torch.Tensor]] = [deque() for _ in range(num_replicas)]
        self._is_empty = True

    def put(self, replica: int, part: torch.Tensor, has_ended: Callable[[int], bool]) -> None:
        self._arrived[replica].append(part)
        self.add_complete(has_ended)

    def add_complete(self, has_ended: Callable[[int], bool]) -> None:
        """Add the rounds for which nothing is missing, because it has arrived, or its replica has ended."""
        while any(self._arrived) and all(parts or has_ended(n) for n, parts in enumerate(self._arrived)):
            for parts in self._arrived:
                if parts:
                    self._add(parts.popleft())

    def _add(self, part: torch.Tensor) -> None:
        if self._is_empty:
            self.total, self._is_empty = part, False
        else:
            self.total.add_(part)
