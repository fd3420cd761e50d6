"""Plans as JSON: written by ``zero-bubble plan --format json`` and read by ``--schedule-file``.

The keys are a contract with other tools (``plan_keys.py``, docs/plan-json.md). Reading takes what was decided, and
ignores times, rates and peaks, which depend on the costs that they were computed with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.zero_bubble.core.analysis.bounds import Bound
from megatron.zero_bubble.core.analysis.score import length_ms
from megatron.zero_bubble.core.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.facts import Facts, facts_from
from megatron.zero_bubble.core.formats.files import is_positive, is_text, is_true, json_object, read_file, read_key
from megatron.zero_bubble.core.formats.layout import layout_from
from megatron.zero_bubble.core.formats.moves import moves_from, offload_from
from megatron.zero_bubble.core.formats.plan_keys import PLAN_KEYS
from megatron.zero_bubble.core.formats.sharding import sharding_from
from megatron.zero_bubble.core.formats.slices import slices_content, slices_from
from megatron.zero_bubble.core.formats.torch_csv import schedule_from_csv
from megatron.zero_bubble.core.formats.vocabulary import algorithm_content, divided_from, flow_from, logits_content
from megatron.zero_bubble.core.ir import Placement, Schedule, Slices
from megatron.zero_bubble.core.ir.sizes import check_size
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, Divided, algorithm_of
from megatron.zero_bubble.core.plan.plan_of import NOTHING, Additions

CSV = ".csv"
OVERLAP_EXPERTS = "overlap_experts"
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
    schedule = timeline.schedule
    content: dict[str, Any] = {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "stage_to_rank": schedule.placement.stage_to_rank,
        **slices_content(schedule.slices),
        **algorithm_content(schedule),
        "order": schedule.to_text(),
        **({OVERLAP_EXPERTS: True} if schedule.overlap_experts else {}),
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
    def vocabulary(self) -> Algorithm | None:
        """The algorithm of vocabulary parallelism; None if the vocabulary is not divided."""
        return None if self.divided is None else self.divided.of_run

    @property
    def besides(self) -> tuple[str, ...]:
        """What a run takes from it besides the schedule, in words."""
        decided = {
            "layout": self.layout,
            "moves": self.added.moves,
            "sharded units": self.added.sharding,
            "recomputed logits": logits_content(self.divided),
        }
        return tuple(name for name, value in decided.items() if value)


def plan_from_json(text: str) -> PlanFile:
    """Read and validate a plan's JSON. Keys that decide nothing are ignored.

    Raises:
        UserError: when the text is not a plan; a ``ScheduleError``, with the grid, when the order is invalid.
    """
    content = json_object(text)
    schedule = _schedule_from(content)
    return PlanFile(
        schedule,
        layout_from(content, schedule.placement),
        offload_from(content),
        Additions(moves=moves_from(content, schedule), sharding=sharding_from(content, schedule.placement)),
        divided_from(content),
        facts_from(content),
    )


def _schedule_from(content: dict[str, Any]) -> Schedule:
    name = read_key(content, "schedule", "a string", is_text)
    num_microbatches = read_key(content, "num_microbatches", "a whole number above 0", is_positive)
    stage_to_rank = read_key(content, "stage_to_rank", "a list of ranks", lambda v: _is_list(v, _is_rank))
    rows = read_key(content, "order", 'one list per rank, of passes such as "0F0"', lambda v: _is_list(v, _is_row))
    placement = Placement(tuple(stage_to_rank))
    flat = Schedule.from_text(name, placement, num_microbatches, rows)
    # Every slice has an F, so the order gives the number of slices; only uneven cuts need a key.
    num_slices = 1 + max((p.slice for p in flat.passes()), default=0)
    slices = slices_from(content) or Slices.even(num_slices)
    chunks = -(-placement.num_stages // placement.num_ranks)
    check_size(placement.num_ranks, num_microbatches, chunks, num_slices)
    schedule = replace(
        flat, slices=slices, make_flow=flow_from(content), overlap_experts=is_true(content, OVERLAP_EXPERTS)
    )
    for key, value in (("num_ranks", schedule.num_ranks), ("num_stages", schedule.num_stages)):
        if content.get(key, value) != value:
            raise UserError(f"{key} must agree with stage_to_rank, which gives {value}; got {content[key]!r}")
    if len(slices) != num_slices:
        raise UserError(f"num_slices must agree with the order, which has {num_slices}; got {len(slices)}")
    validate(schedule)
    return schedule


def read_plan_file(path: str | Path) -> PlanFile:
    """Read a file with ``plan_from_json``, or, if it ends in ``.csv``, in torch's form; errors name the file."""
    if (name := Path(path)).suffix == CSV:
        return read_file(path, "schedule file", lambda text: PlanFile(schedule_from_csv(text, name.stem)))
    return read_file(path, "schedule file", plan_from_json)


def read_schedule_file(path: str | Path) -> Schedule:
    """Read a file with ``read_plan_file``, and return its schedule."""
    return read_plan_file(path).schedule


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_list(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_row(value: object) -> bool:
    return _is_list(value, is_text)
