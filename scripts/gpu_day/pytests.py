"""Run a selection of the tests and write how many passed, and what they recorded.

A selection of which nothing ran is a failure, because skipped tests show nothing, unless the package refuses on this
machine what they would run; such a reason begins with "refused: ". With ``--device cpu``, tests that can
run on CPU ranks do (``ZB_TEST_DEVICE``).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any

import pytest

from gpu_day import step

REFUSED = "refused: "
"""Begins the reason of a test that the package refuses to run on this machine."""


class Outcomes:
    """A plugin that counts the outcomes of tests and collects what they give to ``record_property``."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.recorded: dict[str, dict[str, Any]] = {}
        self.reasons: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the test once: its call, or its set-up or tear-down if that failed or skipped it."""
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
            if report.failed:
                self.failed.append(report.nodeid)
            if report.skipped and isinstance(report.longrepr, tuple):
                self.reasons.add(report.longrepr[2].removeprefix("Skipped: "))
        if report.when == "call" and report.user_properties:
            self.recorded[report.nodeid.rpartition("::")[2]] = {
                str(key): value for key, value in report.user_properties
            }


def main() -> int:
    """Run the tests; return pytest's exit status, or 1 if none passed."""
    options, selection = step.parser(__doc__).parse_known_args()
    os.environ["ZB_TEST_DEVICE"] = options.device
    outcomes = Outcomes()
    code = pytest.main(["-p", "no:cacheprovider", *selection], plugins=[outcomes])
    counts = {name: outcomes.counts[name] for name in ("passed", "failed", "skipped")}
    figures: dict[str, Any] = {**counts, "failed_tests": outcomes.failed, "recorded": outcomes.recorded}
    is_refused = not code and not counts["passed"] and all(each.startswith(REFUSED) for each in outcomes.reasons)
    if is_refused:
        figures["skip_reason"] = "; ".join(outcomes.reasons)
    step.write(options.output, figures)
    return int(code) or int(not counts["passed"] and not is_refused)


if __name__ == "__main__":
    sys.exit(main())
