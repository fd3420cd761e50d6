"""Switch on a schedule without a command line, in processes that someone else's program starts.

    ZERO_BUBBLE_SCHEDULE=zb-h1 python train.py

where ``train.py``, or a framework that it configures, contains ``import megatron.zero_bubble.auto``. This module then
calls ``megatron.zero_bubble.apply`` with the flags in the environment (``planning/job/environment.py``): at once if
megatron-core's schedules are imported already, else at the end of the import that imports them. Rank 0 prints one line.
Without ``ZERO_BUBBLE_SCHEDULE`` it does nothing. ``megatron.zero_bubble.revert()`` undoes it. A run of Megatron-Bridge
also reads the variables in ``config.env_vars``, when it begins (``integration/bridge/install.py``).

It never imports torch, which every Python process of a job would wait for if ``sitecustomize.py`` imports this module,
and which some of them do not have. Only ``ZERO_BUBBLE_DEVICE=cpu`` needs it at once.

Import it before the model is built, and before megatron-core's process groups are made if the schedule is on a V. With
``ZERO_BUBBLE_DEVICE=cpu``, it also lets megatron-core run without a GPU, and must precede megatron-core.

The import raises ``UserError`` for variables that are wrong, whose sentence is all that an uncaught one prints, and
``SeamError`` for an unsupported megatron-core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.import_hook import AfterImport, ImportHook, PostImportHook

if TYPE_CHECKING:
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

_PREFIX = "ZERO_BUBBLE_"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_BRIDGE = "megatron.bridge"
_PRETRAIN = "megatron.bridge.training.pretrain"
_ANY = 2
"""Some number of pipeline ranks, which is not known yet."""


def switch_on(environment: Mapping[str, str]) -> None:
    """Apply the schedule that the variables name, now or when megatron-core's schedules are imported.

    Raises:
        UserError: see ``job.environment.flags_in``; an unknown schedule; or CPU ranks after megatron-core has been
            imported.
    """
    _with_bridge(on_cpu=environment.get(f"{_PREFIX}DEVICE") == "cpu")
    if not any(name.startswith(_PREFIX) for name in environment):
        return
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
    from megatron.zero_bubble.planning.job.environment import flags_in
    from megatron.zero_bubble.planning.job.installed import check_installed

    run = flags_in(environment)
    config = ZeroBubbleConfig.of(run) if run.has_schedule else None
    if config is not None:
        config.sources()(_ANY)  # refuse a bad schedule here, not in a later import of megatron-core
    if run.observations.device == "cpu":
        check_installed("torch")  # megatron.core may come from a checkout that is not on the path yet
        from megatron.zero_bubble.engine.platforms.cpu import use_cpu_ranks

        use_cpu_ranks()
    if config is None:
        return
    if _SCHEDULES in sys.modules:
        _apply(config)
        return
    # Modules of this package that import megatron-core's count too, because apply() needs them as well.
    sys.meta_path.insert(0, AfterImport("megatron.", _SCHEDULES, lambda: _apply(config)))


def init(*_args: object) -> None:
    """Do nothing: for frameworks that take a function by its path; importing this module is all that is needed."""


def _with_bridge(on_cpu: bool) -> None:
    """Let the runs of Megatron-Bridge, if it is there, read the variables too, also those of their configuration."""

    def install() -> None:
        from megatron.zero_bubble.integration.bridge.install import install

        install(_say)

    @contextmanager
    def as_a_job(_: ModuleType) -> Iterator[None]:
        from megatron.zero_bubble.engine.platforms import cpu
        from megatron.zero_bubble.engine.platforms.cpu.megatron_lm import JOB_POINTS

        cpu.install(JOB_POINTS)
        yield

    if _PRETRAIN in sys.modules:
        install()
        return
    if find_spec(_BRIDGE) is None:
        return
    sys.meta_path.insert(0, PostImportHook({_PRETRAIN}, lambda _: install()))
    if on_cpu:
        sys.meta_path.insert(0, ImportHook({_BRIDGE}.__contains__, as_a_job))


def _apply(config: ZeroBubbleConfig) -> None:
    from megatron.zero_bubble.integration.patching.apply import apply, in_place_of

    apply(config, say=_say)
    _say(f"{in_place_of(config)}, by the environment")


def _say(line: str) -> None:
    """Print a line on rank 0, and in processes whose rank is not known yet."""
    if os.environ.get("RANK", "0") == "0":
        print(f"zero-bubble: {line}", flush=True)


def _without_traceback(error: UserError) -> None:
    """Let Python print only the sentence of this error if nobody catches it, once per node."""
    original = sys.excepthook

    def excepthook(kind: type[BaseException], raised: BaseException, traceback: TracebackType | None) -> None:
        if raised is not error:
            original(kind, raised, traceback)
        elif os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"zero-bubble: {error}", file=sys.stderr, flush=True)

    sys.excepthook = excepthook


try:
    switch_on(os.environ)
except UserError as error:
    _without_traceback(error)
    raise
