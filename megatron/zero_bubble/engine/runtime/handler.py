"""What the executor and the handlers of ops agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

STOP = object()
"""Returned by a handler if the plan must stop at this op; all other ranks stop too."""

FORGOTTEN = object()
"""Placeholder for a value that was discarded or not computed because the ranks stopped."""

Handler = Callable[[Any, Sequence[Any]], Any]
"""Runs the ops of one class.

Arguments are the op and its input values: first those that the op uses, then those that it takes, in the order of its
``effects``. Returns the values that the op gives, in the order of its ``effects``, or ``STOP``.
"""


class Awaited:
    """A value that has not arrived yet."""

    def wait(self, needed_by: object) -> Any:
        """Wait for the value and return it; ``needed_by`` is named in errors."""
        raise NotImplementedError
