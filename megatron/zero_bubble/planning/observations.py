"""How a run is observed, and on what it runs: flags of a job that are no part of a ``Setup``."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.planning.decision import SWITCH, Decision, iterations

OBSERVATIONS = (
    Decision(
        "record-costs",
        "core",
        "FILE",
        "write measured pass times and memory to FILE, as input for `zero-bubble plan --costs`",
        field="",
    ),
    Decision(
        "trace",
        "expert",
        "DIR",
        "write recorded iterations to DIR: planned and measured timelines as HTML, SVG, Perfetto trace and JSON",
        field="",
    ),
    Decision(
        "trace-iterations",
        "expert",
        "LIST",
        "iterations to record for --zero-bubble-trace and --zero-bubble-record-costs, e.g. 10-12,50",
        "the last eight of the run",
        iterations,
        "",
    ),
    Decision(
        "log-bubble",
        "expert",
        SWITCH,
        "log the measured and the planned bubble rate by span at every --log-interval",
        field="",
    ),
    Decision(
        "device",
        "expert",
        ("cpu", "cuda", "auto"),
        "device to train on; auto selects cuda if a GPU is available",
        "auto",
        field="",
    ),
)
"""One row per flag."""


@dataclass(frozen=True)
class Observations:
    """How a run is observed, and on what it runs; each field is the flag of its name.

    Attributes:
        record_costs: the file for measured costs; None for no measurement.
        trace: the folder for recorded iterations; None for none.
        trace_iterations: which iterations to record; None for the last ones.
        log_bubble: whether bubble rates are logged.
        device: ``cpu``, ``cuda`` or ``auto``.
    """

    record_costs: str | None = None
    trace: str | None = None
    trace_iterations: tuple[range, ...] | None = None
    log_bubble: bool = False
    device: str = "auto"

    @property
    def records(self) -> bool:
        """Whether iterations are recorded."""
        return bool(self.trace or self.record_costs)
