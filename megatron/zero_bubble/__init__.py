"""Pipeline-parallel Megatron training without bubbles.

The names below are the pure part: schedules as values, what they cost, and whether they are valid. None of it imports
torch; what trains lives in ``runtime``, ``patching`` and ``training``.
"""

from megatron.zero_bubble.analysis.errors import ScheduleError
from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.analysis.validate import validate
from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.schedules import SCHEDULES, build

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
    "Timeline",
    "build",
    "simulate",
    "validate",
]
