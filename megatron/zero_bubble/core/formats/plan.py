"""Plans as JSON: written by ``zero-bubble plan --format json`` and read by ``--schedule-file``.

The keys are a contract with other tools (``plan_keys.py``, docs/plan-json.md). Reading takes what was decided, and
ignores times, rates and peaks, which depend on the costs that they were computed with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.zero_bubble.core.analysis.bounds import Bound
from megatron.zero_bubble.core.analysis.score import length_ms
from megatron.zero_bubble.core.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.core.formats.facts import Facts, facts_from
from megatron.zero_bubble.core.formats.files import json_object, read_file
from megatron.zero_bubble.core.formats.layout import layout_from
from megatron.zero_bubble.core.formats.moves import offload_from
from megatron.zero_bubble.core.formats.plan_keys import PLAN_KEYS
from megatron.zero_bubble.core.formats.schedule import (
    additions_from,
    additions_in_words,
    divided_from,
    schedule_content,
    schedule_from,
)
from megatron.zero_bubble.core.formats.torch_csv import schedule_from_csv
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.ir.vocabulary import Divided, algorithm_of
from megatron.zero_bubble.core.plan.plan_of import NOTHING, Additions

CSV = ".csv"
_NAMES = frozenset(key.name for key in PLAN_KEYS)


@dataclass(frozen=True)
class Certificate:
    """The quality of a plan: no schedule with its placement and within ``memory_limit`` is shorter than ``bound``.

    ``memory_limit`` is in the unit of memory of the costs, and ``microbatches`` is the same limit in microbatches on
    the fullest rank. ``seconds`` is the planning time.
    """

    objective: Metric
    memory_limit: float
    microbatches: float
    bound: Bound
    seconds: float

    def gap(self, timeline: Timeline) -> float:
        """Return the largest share of the plan's length that a better plan could save; it may be below 0 for a plan
        that exceeds the limit.
        """
        return self.bound.gap(length_ms(timeline, self.objective))


def plan_to_json(
    timeline: Timeline, certificate: Certificate | None = None, more: Mapping[str, Any] | None = None
) -> str:
    """Write the plan as JSON text, with one line per key and one line per rank's order.

    Args:
        more: further keys of ``PLAN_KEYS``, for what was decided in addition to the schedule, and its figures.
    """
    lines = []
    for key, value in (plan_content(timeline, certificate) | dict(more or {})).items():
        assert key in _NAMES, f"{key} must be in the table of keys"
        text = json.dumps(value)
        if key == "order":
            text = "[\n    " + ",\n    ".join(json.dumps(row) for row in value) + "\n  ]"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plan_content(timeline: Timeline, certificate: Certificate | None = None) -> dict[str, Any]:
    """Return the content of the plan's JSON, by key."""
    content: dict[str, Any] = {
        **schedule_content(timeline.schedule),
        "makespan_ms": timeline.makespan_ms,
        "span_ms": timeline.span_ms,
        "bubble_rate_makespan": timeline.bubble_rate("makespan"),
        "bubble_rate_span": timeline.bubble_rate("span"),
        "idle_rate_makespan": timeline.idle_rate("makespan"),
        "idle_rate_span": timeline.idle_rate("span"),
        "imbalance": timeline.imbalance,
        "peak_activation": timeline.peak_activation,
    }
    if certificate is not None:
        content |= {
            "objective": certificate.objective,
            "memory_limit": certificate.memory_limit,
            "memory_limit_microbatches": certificate.microbatches,
            "lower_bound_ms": certificate.bound.value_ms,
            "lower_bound_reason": certificate.bound.reason,
            "gap": certificate.gap(timeline),
            "planning_seconds": certificate.seconds,
        }
    return content


@dataclass(frozen=True)
class PlanFile:
    """What a plan decides, and a run takes from its file.

    Attributes:
        schedule: the passes in their order, with their placement, slices and algorithm of vocabulary parallelism.
        layout: the layers of every stage, as ``--pipeline-model-parallel-layout``; None for those that the flags of a
            job give.
        offload: the choice that its moves are for, such as ``auto``; None for a plan without offloading.
        added: what the plan has in addition to the passes: moves to host memory, and sharded chunks.
        divided: how the vocabulary is divided; by default, as the passes of the schedule say.
        facts: those of the job that the plan was made for; empty if they are unknown.
    """

    schedule: Schedule
    layout: str | None = None
    offload: str | None = None
    added: Additions = NOTHING
    divided: Divided | None = None
    facts: Facts = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.divided is None and (algorithm := algorithm_of(self.schedule)) is not None:
            object.__setattr__(self, "divided", Divided(algorithm))

    @property
    def besides(self) -> tuple[str, ...]:
        """What a run takes from it besides the schedule, in words."""
        return (*(["layout"] if self.layout else []), *additions_in_words(self.added, self.divided))


def plan_from_json(text: str) -> PlanFile:
    """Read and validate a plan's JSON. Keys that decide nothing are ignored.

    Raises:
        UserError: when the text is not a plan; a ``ScheduleError``, with the grid, when the order is invalid.
    """
    content = json_object(text)
    schedule = schedule_from(content)
    return PlanFile(
        schedule,
        layout_from(content, schedule.placement),
        offload_from(content),
        additions_from(content, schedule),
        divided_from(content),
        facts_from(content),
    )


def read_plan_file(path: str | Path) -> PlanFile:
    """Read a file with ``plan_from_json``, or, if it ends in ``.csv``, in torch's form; errors name the file."""
    if (name := Path(path)).suffix == CSV:
        return read_file(path, "schedule file", lambda text: PlanFile(schedule_from_csv(text, name.stem)))
    return read_file(path, "schedule file", plan_from_json)


def read_schedule_file(path: str | Path) -> Schedule:
    """Read a file with ``read_plan_file``, and return its schedule."""
    return read_plan_file(path).schedule
