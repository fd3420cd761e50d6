"""A call that ends with an exception among its passes: what it leaves, and why no other call follows.

Messages of the call are still under way, and every rank has read another number of microbatches. The next call would
compute on them, or wait for what nobody sends. So this rank closes its connections at once, which ends the call on the
ranks that wait for it, and its own next call ends with a sentence.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron.zero_bubble.core.errors import PeerError, UserError
from megatron.zero_bubble.engine.runtime.groups import cause_of_cut, cut

_RESTART = "start the job again from its last checkpoint"
_TOGETHER = (
    ", or, if every rank of the job has left that call with an error, call megatron.zero_bubble.disconnect() on all of "
    "them, zero the gradients, and go on with the same microbatches on all"
)
_WIDTH = 300
"""The most characters of an error that other ranks print."""
_EPOCH = "give every call as many microbatches as its num_microbatches, also at the end of the data; "


class Unfinished:
    """Whether the last call of this rank was finished."""

    def __init__(self) -> None:
        self._passes_began = False
        self._ended_with: str | None = None

    def check(self, can_join_again: bool) -> None:
        """Refuse a call after one that was not finished.

        Args:
            can_join_again: whether the ranks can go on after they have disconnected.

        Raises:
            UserError: what ended the call, and the remedy.
        """
        if (name := self._ended_with) is not None:
            raise UserError(
                "a call of the forward-backward function must be finished before the next one; the last one of this "
                f"rank ended with {name}; {_EPOCH * (name == 'StopIteration')}{_RESTART}{_TOGETHER * can_join_again}",
                everywhere=False,
            )

    @contextmanager
    def noted(self, forget: Callable[[], None], pipeline: dist.ProcessGroup) -> Iterator[None]:
        """Context of a call. If it fails, this rank closes its connections, and has an unfinished call.

        A mistake of the user that is found before the passes leaves nothing, and the call may be repeated; so may any
        call of a rank without peers.

        Args:
            forget: releases what a failed call has left.
            pipeline: the ranks of the pipeline.

        Raises:
            PeerError: a rank of the pipeline has failed; it ends with the error of that rank, if it is known.
        """
        self._passes_began = False
        try:
            yield
        except BaseException as error:
            if not self._passes_began and isinstance(error, UserError):
                raise
            forget()
            if pipeline.size() == 1:
                raise
            self._ended_with = type(error).__name__
            if not isinstance(error, PeerError):
                cut(f"pipeline rank {pipeline.rank()} ended with {_described(error)}")
                raise
            cause = cause_of_cut()
            cut()
            if cause is None:
                raise
            raise PeerError(f"{error}; {cause}") from error

    def begin_passes(self) -> None:
        """From now on, other ranks may depend on the call."""
        self._passes_began = True

    def disconnected(self) -> None:
        """All ranks have disconnected, and may begin again."""
        self._ended_with = None


def _described(error: BaseException) -> str:
    """The class of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *(textwrap.shorten(each, _WIDTH) for each in lines[:1])])
