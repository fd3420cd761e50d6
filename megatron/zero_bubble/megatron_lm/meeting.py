"""Problems that only some ranks can see, such as a folder of one machine: all ranks end together.

A rank that ended alone, while the flags are checked, would leave the others waiting for it. So it keeps its problem
until the ranks have joined, and all of them raise it there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from megatron.zero_bubble.errors import UserError


class Meeting:
    """What this rank has to report to the others."""

    def __init__(self) -> None:
        self._problem: str | None = None

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Keep the UserError that is raised within, the first if there are several."""
        try:
            yield
        except UserError as error:
            self._problem = self._problem or str(error)

    def hold(self) -> None:
        """Exchange the problems; every rank calls this once it has joined the others.

        Raises:
            UserError: on every rank, the problem of the first that has one.
        """
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, self._problem)
        problem = next(filter(None, problems), None)
        if problem is not None:
            raise UserError(problem)
