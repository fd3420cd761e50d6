"""Installs and reverts the CPU platform."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable
from types import ModuleType

import torch

from megatron.zero_bubble.engine.import_hook import PostImportHook
from megatron.zero_bubble.engine.platforms.cpu.points import ABSENT, POINTS, Point
from megatron.zero_bubble.engine.platforms.cpu.stand_ins import CudaMeansCpu


def _not_about_shared_generator(record: logging.LogRecord) -> bool:
    """Filter out core's warning that the CPU generator changed while the device's was used; here both are the same."""
    return "CPU RNG state changed" not in record.getMessage()


class _Installation:
    """The changes of :func:`install` in order, which :func:`revert` undoes in reverse order.

    Args:
        points: the names to replace.
        mode: entered until ``revert``; None if another installation has entered it.
    """

    def __init__(self, points: Iterable[Point], mode: CudaMeansCpu | None) -> None:
        self.points = tuple(points)
        self._undo: list[tuple[object, str, object]] = []
        self._mode = mode
        self._hook = PostImportHook({point.module for point in self.points}, self._apply_to)
        self._logger = logging.getLogger("megatron.core.tensor_parallel.random")

    def install(self) -> None:
        try:
            for name in dict.fromkeys(point.module for point in self.points):
                if name in sys.modules or not name.startswith("megatron."):
                    self._apply_to(importlib.import_module(name))
        except RuntimeError:
            self._put_back()
            raise
        sys.meta_path.insert(0, self._hook)
        if self._mode is not None:
            self._logger.addFilter(_not_about_shared_generator)
            self._mode.__enter__()

    def revert(self) -> None:
        if self._mode is not None:
            if torch.overrides._get_current_function_mode() is not self._mode:
                raise RuntimeError(
                    "the CPU platform must be reverted by the thread that installed it, after all torch function modes "
                    "that were entered later; leave those modes first"
                )
            self._mode.__exit__(None, None, None)
            self._logger.removeFilter(_not_about_shared_generator)
        sys.meta_path.remove(self._hook)
        self._put_back()

    def _put_back(self) -> None:
        for owner, name, original in reversed(self._undo):
            if original is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def _apply_to(self, module: ModuleType) -> None:
        for point in self.points:
            if point.module != module.__name__:
                continue
            owner = getattr(module, point.owner.partition(":")[2]) if ":" in point.owner else module
            # Bypass the descriptor protocol, so that revert() restores the identical object.
            original = vars(owner).get(point.name, ABSENT)
            if original is ABSENT and not point.optional:
                raise RuntimeError(
                    f"the CPU platform needs {point.owner}.{point.name} ({point.why}), which this version does not "
                    "have; use a supported version of megatron-core (see README)"
                )
            setattr(owner, point.name, point.make(original))
            self._undo.append((owner, point.name, original))


_installed: list[_Installation] = []


def installed() -> bool:
    """Whether the CPU platform is installed in this process."""
    return bool(_installed)


def install(more: Iterable[Point] = ()) -> None:
    """Install the CPU platform; a second call only adds points. Call this before importing megatron.core.

    Args:
        more: points in addition to :data:`POINTS`, for jobs that use more of CUDA than megatron-core does.
    """
    if _installed:
        there = {point for installation in _installed for point in installation.points}
        installation = _Installation([point for point in more if point not in there], None)
    else:
        installation = _Installation((*POINTS, *more), CudaMeansCpu())
    if installation.points or not _installed:
        installation.install()
        _installed.append(installation)


def revert() -> None:
    """Restore the original object of every name. Functions that megatron-core has decorated stay uncompiled."""
    while _installed:
        _installed[-1].revert()
        _installed.pop()
