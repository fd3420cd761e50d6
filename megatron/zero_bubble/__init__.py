"""Zero-bubble pipeline parallelism for Megatron.

The names below are imported on first use. Most do not import torch: schedules as values, their costs, and their
validation. Training lives in ``runtime`` and the packages above it, with ``apply``, ``build_stages``, ``disconnect``,
``report``, ``revert``, ``shapes``, ``ModelStages`` and ``use_cpu_ranks``:

    import megatron.zero_bubble
    megatron.zero_bubble.apply("zb-h1")  # every get_forward_backward_func() now runs ZB-H1
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.zero_bubble.core.analysis.errors import ScheduleError
    from megatron.zero_bubble.core.analysis.simulate import simulate
    from megatron.zero_bubble.core.analysis.timeline import Timeline
    from megatron.zero_bubble.core.analysis.validate import validate
    from megatron.zero_bubble.core.costs import PassCosts, PassMemory
    from megatron.zero_bubble.core.costs.lengths import LengthCost
    from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule, Slices
    from megatron.zero_bubble.core.schedules import SCHEDULES, build
    from megatron.zero_bubble.engine.platforms.cpu import use_cpu_ranks
    from megatron.zero_bubble.integration.adapter.model_stages import ModelStages
    from megatron.zero_bubble.integration.patching.apply import apply, build_stages, disconnect, report, revert, shapes
    from megatron.zero_bubble.planning.balance import balance
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

__version__ = "0.2.0"

__all__ = [
    "SCHEDULES",
    "Kind",
    "LengthCost",
    "ModelStages",
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
    "balance",
    "build",
    "build_stages",
    "disconnect",
    "report",
    "revert",
    "shapes",
    "simulate",
    "use_cpu_ranks",
    "validate",
]


_WITH_TORCH = {
    **dict.fromkeys(("apply", "build_stages", "disconnect", "report", "revert", "shapes"), "integration.patching"),
    "ModelStages": "integration.adapter.model_stages",
    "use_cpu_ranks": "engine.platforms.cpu",
}
"""Names that need torch, and the modules that define them."""
_ON_FIRST_USE = {
    **_WITH_TORCH,
    **dict.fromkeys(("SCHEDULES", "build"), "core.schedules"),
    **dict.fromkeys(("Kind", "Pass", "Placement", "Schedule", "Slices"), "core.ir"),
    **dict.fromkeys(("PassCosts", "PassMemory"), "core.costs"),
    "LengthCost": "core.costs.lengths",
    "ScheduleError": "core.analysis.errors",
    "Timeline": "core.analysis.timeline",
    "ZeroBubbleConfig": "planning.job.config",
    "balance": "planning.balance",
    "simulate": "core.analysis.simulate",
    "validate": "core.analysis.validate",
}
"""All names, and the modules that define them. Every Python process of a job may import ``auto`` from this package."""


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name in _WITH_TORCH:
        from megatron.zero_bubble.planning.job.installed import check_installed

        check_installed("torch", "megatron.core")
    return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
