"""Zero-bubble pipeline parallelism for Megatron.

The names below are the part of the package that does not import torch: schedules as values, their costs, and their
validation. Training lives in ``runtime`` and the packages above it. ``apply``, ``report`` and ``revert`` are imported
from ``patching`` on first use:

    import megatron.zero_bubble
    megatron.zero_bubble.apply("zb-h1")  # every get_forward_backward_func() now runs ZB-H1
"""

from typing import TYPE_CHECKING, Any

from megatron.zero_bubble.analysis.errors import ScheduleError
from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.analysis.validate import validate
from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.ir import Kind, Pass, Placement, Schedule, Slices
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.schedules import SCHEDULES, build

if TYPE_CHECKING:
    from megatron.zero_bubble.patching import apply, report, revert

__version__ = "0.1.0"

__all__ = [
    "SCHEDULES",
    "Kind",
    "Pass",
    "PassCosts",
    "PassMemory",
    "Placement",
    "Schedule",
    "ScheduleError",
    "Slices",
    "Timeline",
    "ZeroBubbleConfig",
    "apply",
    "build",
    "report",
    "revert",
    "simulate",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in ("apply", "report", "revert"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.zero_bubble.job.installed import check_installed

    check_installed("torch", "megatron.core")
    from megatron.zero_bubble import patching

    return getattr(patching, name)
