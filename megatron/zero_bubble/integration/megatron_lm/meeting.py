"""Raise a problem that only some ranks detect, such as a read-only folder on one machine, on all ranks.

A rank that exited alone while flags are checked would leave the other ranks waiting for it. It therefore stores its
problem until the ranks have joined the process group, where all of them raise it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from megatron.zero_bubble.core.errors import UserError


class Meeting:
    """The problem of this rank, to be exchanged with the other ranks."""

    def __init__(self) -> None:
        self._problem: str | None = None

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Store a UserError that is raised in this block instead of raising it; only the first one is stored."""
        try:
            yield
        except UserError as error:
            self._problem = self._problem or str(error)

    def hold(self) -> None:
        """Exchange the problems; every rank calls this when it has joined the process group.

        Raises:
            UserError: on every rank, the problem of the lowest rank that has one.
        """
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, self._problem)
        problem = next(filter(None, problems), None)
        if problem is not None:
            raise UserError(problem)
