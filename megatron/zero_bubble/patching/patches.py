"""Apply seams and take them back; the one place of the package that assigns to a foreign module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import megatron.core
from megatron.core import parallel_state

from megatron.zero_bubble.config import AUTO, ZeroBubbleConfig
from megatron.zero_bubble.ir import Kind, Pass, Schedule
from megatron.zero_bubble.patching import core_0_16, transformer_engine
from megatron.zero_bubble.patching.seam import Seam
from megatron.zero_bubble.plan_file import read_schedule_file
from megatron.zero_bubble.platforms import select
from megatron.zero_bubble.runtime.auto import AutoOptions, AutoPipeline
from megatron.zero_bubble.runtime.executor import PassObserver
from megatron.zero_bubble.runtime.gradients import FusedAccumulator, GradAccumulator
from megatron.zero_bubble.runtime.linear import split_linear
from megatron.zero_bubble.runtime.measure import Recorder
from megatron.zero_bubble.runtime.pipeline import Pipeline
from megatron.zero_bubble.runtime.placement import add_tied_gradients, is_megatrons_own, last_stage_of
from megatron.zero_bubble.schedules import build, recipe

# The megatron-core minors whose seams are known, each with the module that lists them.
_KNOWN = {"0.16": core_0_16}


# A seam, and how to make the replacement from the original.
_Replacement = tuple[Seam, Callable[[Callable[..., Any]], Callable[..., Any]]]


class PatchError(RuntimeError):
    """This megatron-core cannot be patched, or is patched already."""


class _Patches:
    """Replaced names with their originals, in the order of replacement."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Seam, ModuleType | type, Callable[..., Any]]] = []
        self._close: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, replacements: list[_Replacement], close: Callable[[], None]) -> None:
        """Check every seam first, then replace all of them: nothing is left half done; ``close`` comes with revert."""
        resolved = [(seam, make, *seam.resolve()) for seam, make in replacements]
        for seam, make, holder, original in resolved:
            setattr(holder, seam.attribute, make(original))
            self._replaced.append((seam, holder, original))
        self._close = close

    def revert(self) -> None:
        close, self._close = self._close, lambda: None
        while self._replaced:
            seam, holder, original = self._replaced.pop()
            setattr(holder, seam.attribute, original)
        close()

    def report(self) -> list[str]:
        return [f"{seam.module}.{seam.name}: {seam.why}" for seam, _, _ in self._replaced]


_active = _Patches()


def apply(
    config: ZeroBubbleConfig, observer: PassObserver | None = None, say: Callable[[str], None] = print
) -> Pipeline:
    """Make megatron-core's pipelines run the schedule of ``config``.

    Call it once, on every rank, before the first iteration; ``get_forward_backward_func`` then returns ours.

    Args:
        observer: told of every pass (``runtime.measure.Recorder``).
        say: where ``zb-auto`` reports what it measured and planned, on rank 0.

    Returns:
        what now runs the iterations.

    Raises:
        PatchError: an unknown megatron-core, or a second call without ``revert``.
        SeamError: an upstream name that is not as expected.
        ValueError: an unknown schedule or a bad schedule file.
    """
    seams = _seams()
    pipeline = _pipeline(config, observer, say)
    replacements: list[_Replacement] = [
        (seams.SCHEDULE, lambda _: pipeline.forward_backward),
        (seams.SCHEDULE_OF_CHUNKS, lambda _: pipeline.forward_backward),
        (seams.LINEAR, lambda original: split_linear(original, pipeline.store, pipeline.accumulate)),
    ]
    placement_on = functools.cache(config.placement_on)
    if not is_megatrons_own(placement_on(2)):
        replacements += [
            (seams.LAST_STAGE, lambda original: last_stage_of(placement_on, original)),
            (seams.TIED_GRADIENTS, add_tied_gradients),
        ]
    engine = transformer_engine.split(pipeline.store)

    def close() -> None:
        engine.close()
        pipeline.close()

    _replace([*replacements, *engine.replacements], close)
    return pipeline


def observe(observer: PassObserver) -> None:
    """Leave megatron-core's own 1F1B in place and tell ``observer`` of its passes.

    Raises:
        PatchError, SeamError: as ``apply``.
    """
    seams = _seams()
    stock = _StockPasses(observer)
    _replace(
        [
            (seams.SCHEDULE, stock.restarted),
            (seams.FORWARD_STEP, lambda original: stock.timed(original, Kind.F)),
            (seams.BACKWARD_STEP, lambda original: stock.timed(original, Kind.BW)),
        ]
    )


def revert() -> None:
    """Restore every upstream name and disconnect; does nothing where nothing is applied."""
    _active.revert()


def report() -> list[str]:
    """One line for each name that is replaced now."""
    return _active.report()


def _replace(replacements: list[_Replacement], close: Callable[[], None] = lambda: None) -> None:
    if _active:
        raise PatchError("megatron-core is patched already; call revert() before applying another configuration")
    _active.replace(replacements, close)


def _seams() -> ModuleType:
    version = megatron.core.__version__
    minor = ".".join(version.split(".")[:2])
    if minor not in _KNOWN:
        raise PatchError(
            f"zero-bubble training knows the seams of megatron-core {', '.join(_KNOWN)}; this is {version}; "
            "install a known one"
        )
    return _KNOWN[minor]


def _pipeline(config: ZeroBubbleConfig, observer: PassObserver | None, say: Callable[[str], None]) -> Pipeline:
    accumulate = _accumulator(config)
    if config.schedule != AUTO:
        maker, timeout = _schedule_maker(config), config.peer_timeout_s
        return Pipeline(maker, timeout, observer, config.measure_memory, config.post_validation, accumulate)
    recorder = Recorder(select("auto"))
    options = AutoOptions(config.memory_limit, config.placement, config.post_validation)
    return AutoPipeline(options, recorder, say, config.peer_timeout_s, observer, accumulate)


def _accumulator(config: ZeroBubbleConfig) -> GradAccumulator:
    if not config.fuse_wgrad:
        return GradAccumulator()
    if not config.wgrad_stream:
        return FusedAccumulator()
    return FusedAccumulator(lambda device_type: select(device_type).beside())


def _schedule_maker(config: ZeroBubbleConfig) -> Callable[[int, int], Schedule]:
    """From the configuration to a function of (ranks, microbatches); bad names and files are refused here."""
    if config.schedule_file is not None:
        from_file = read_schedule_file(config.schedule_file)
        return lambda num_ranks, num_microbatches: from_file
    assert config.schedule is not None, "one of the two is given"
    return functools.partial(_build, recipe(config.schedule).name, config.num_chunks)


def _build(name: str, num_chunks: int | None, num_ranks: int, num_microbatches: int) -> Schedule:
    return build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)


class _StockPasses:
    """Numbers the passes of the stock schedule, which runs F and BW each in the order of the microbatches."""

    def __init__(self, observer: PassObserver) -> None:
        self._observer = observer
        self._next = {Kind.F: 0, Kind.BW: 0}

    def restarted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward_backward(**kwargs: Any) -> Any:
            self._next = {Kind.F: 0, Kind.BW: 0}
            return original(**kwargs)

        return forward_backward

    def timed(self, original: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            work = Pass(parallel_state.get_pipeline_model_parallel_rank(), kind, self._next[kind])
            self._next[kind] += 1
            self._observer.begin(work)
            result = original(*args, **kwargs)
            self._observer.end(work)
            return result

        return step
