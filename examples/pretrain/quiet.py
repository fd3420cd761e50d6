"""Suppress messages of megatron-core, each listed here, that a user of this training loop cannot act on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NO_USE = (
    # Advice to install a package, printed at import; our start-up line shows which layers are used.
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # megatron-core deprecates a default of its own configuration.
    "full scope is deprecated",
)
_NO_USE_BELOW_ERRORS = (
    "megatron.core.rerun_state_machine",  # logs its mode, which this program fixes
    "megatron.core.datasets.gpt_dataset",  # warns that it cannot cache the indices of mock data, which need no cache
)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress these messages in this block; used around imports and set-up."""
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
