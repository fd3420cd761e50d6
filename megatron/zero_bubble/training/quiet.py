"""Keeps megatron-core's messages that no user of this loop can act on off the screen, each named here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NO_USE = (
    # Advice at import to install what the start-up line names as absent anyway.
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # A default of core's own configuration, deprecated by core.
    "full scope is deprecated",
)
_NO_USE_BELOW_ERRORS = (
    "megatron.core.rerun_state_machine",  # announces its mode, which is not a choice here
    "megatron.core.datasets.gpt_dataset",  # cannot keep the indices of mock data, nor need it
)


@contextmanager
def quiet() -> Iterator[None]:
    """A block, around imports and set-up, without those warnings."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in _NO_USE_BELOW_ERRORS}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for message in _NO_USE:
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        try:
            yield
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)
