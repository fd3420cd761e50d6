"""What only some ranks can detect, all of them refuse: otherwise the others would wait for those that have ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.runtime.groups import torchs


@contextmanager
def refused_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Context that raises a UserError of one rank on all ranks of ``group``, by default of the job; a collective call.

    Raises:
        UserError: that of the first rank that has one.
    """
    problem = None
    try:
        yield
    except UserError as error:
        problem = str(error)
    of_group = None if group is None else torchs(group)
    problems: list[str | None] = [None] * dist.get_world_size(of_group)
    dist.all_gather_object(problems, problem, group=of_group)
    first = next(filter(None, problems), None)
    if first is not None:
        raise UserError(first)
