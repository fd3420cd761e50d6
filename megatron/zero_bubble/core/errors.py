"""Exceptions that more than one layer of this package uses, and refusals as values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Remedy(NamedTuple):
    """Flags of Megatron's own with which a job would not be refused.

    Attributes:
        adds: flags to add, with their values.
        drops: flags to leave out.
        is_counted: whether estimates know what the options without it save.
    """

    adds: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    is_counted: bool = False


class UserError(ValueError):
    """Invalid user input. The message states the rule, the values and the remedy.

    Entry points print it on stderr without a traceback, and exit with code 2; a Megatron-LM job exits with 1.

    Attributes:
        everywhere: whether every rank raises the same error, so that only rank 0 prints it.
        remedy: flags with which there would be no error, where they leave the model as it is; None if none are known.
    """

    def __init__(self, message: str, everywhere: bool = True, remedy: Remedy | None = None) -> None:
        super().__init__(message)
        self.everywhere = everywhere
        self.remedy = remedy


class PlanError(UserError):
    """A plan that could deadlock or lose data; the message names the waiting rank and what it waits for."""


@dataclass(frozen=True)
class Refusal:
    """Why something is refused, as a value, where another choice is made then.

    Attributes:
        reason: the rule, the values and the remedy.
        is_of_plan: whether only a plan is refused, which another run could have.
        remedy: as in ``UserError``.
    """

    reason: str
    is_of_plan: bool = False
    remedy: Remedy | None = None


def attempted(make: Callable[[], T]) -> T | Refusal:
    """Return what ``make`` returns, or why it refuses."""
    try:
        return make()
    except UserError as error:
        return Refusal(str(error), isinstance(error, PlanError), error.remedy)


@contextmanager
def explaining(before: str = "", after: str = "") -> Iterator[None]:
    """Context in which the sentence of a ``UserError`` also says what was being read or done.

    Args:
        before: what stands in front of the sentence.
        after: what stands behind it.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{before}{error}{after}", error.everywhere, error.remedy) from error


class PeerError(RuntimeError):
    """A peer did not send or receive a message; the text names the pipeline ranks, the channel and the pass."""


class SeamError(RuntimeError):
    """The upstream version is unknown, or a name that this package replaces or uses is not as expected."""


class PatchError(RuntimeError):
    """The upstream names are already replaced."""


def as_flag(option: str) -> str:
    """Return the flag of an option: ``num_ranks`` gives ``--num-ranks``."""
    return f"--{option.replace('_', '-')}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the one of the ``known`` words that was probably meant by ``word``; None if none is similar."""
    from difflib import get_close_matches  # takes a while to import, and only errors need it

    found = get_close_matches(word.lower().replace("_", "-"), {one.replace("_", "-"): one for one in known}, n=1)
    return next((one for one in known if found and one.replace("_", "-") == found[0]), None)


def beyond_floats(error: OverflowError) -> str:
    """Return the error message for figures whose products or quotients overflow."""
    return f"some figures are too large or too small to plan with: {error}; give figures nearer to 1"
