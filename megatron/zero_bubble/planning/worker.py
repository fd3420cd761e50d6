"""Planning in a separate process.

``python -m megatron.zero_bubble.planning.worker`` reads a request as JSON from its standard input and writes the plan,
in the form of ``zero-bubble plan --format json``, to its standard output. The process runs at the lowest priority. For
an invalid request it prints one sentence on stderr and exits with code 2.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.errors import UserError, beyond_floats
from megatron.zero_bubble.core.formats.costs import CostsFile
from megatron.zero_bubble.core.formats.files import is_positive, is_text, json_object, read_key
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.ir.queues import HardwareQueues
from megatron.zero_bubble.core.plan.nccl import Ctas
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.codecs import parse, spell
from megatron.zero_bubble.planning.feasibility import ANY_RUN, Feasibility
from megatron.zero_bubble.planning.figures import measured
from megatron.zero_bubble.planning.question import of_run
from megatron.zero_bubble.planning.setup import Setup

_LOWEST_PRIORITY = 19
MEMORY_LIMIT = "memory_limit"
_SETUP, _RUNS = "setup", "runs"

_KEYS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "costs": ("the text of a costs file", is_text),
    "num_ranks": ("a whole number above 0", is_positive),
    "num_microbatches": ("a whole number above 0", is_positive),
}


@dataclass(frozen=True)
class Request:
    """A request for a plan.

    Attributes:
        costs: the text of a costs file.
        setup: what the run does, with ``zb-auto``.
        runs: what the run has for its plans.
    """

    costs: str
    num_ranks: int
    num_microbatches: int
    setup: Setup
    runs: Feasibility = ANY_RUN

    def to_json(self) -> str:
        """Write the request as JSON; ``from_json`` reads it back unchanged."""
        content = {key: getattr(self, key) for key in _KEYS}
        return json.dumps(content | {_SETUP: spell(self.setup, "json"), _RUNS: asdict(self.runs)})

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read a request.

        Raises:
            UserError: when a key is missing or has an invalid value.
        """
        content = json_object(text)
        values = {key: read_key(content, key, form, fits) for key, (form, fits) in _KEYS.items()}
        setup = read_key(content, _SETUP, "the decisions of a run", lambda value: isinstance(value, dict))
        runs = _feasibility(content[_RUNS]) if _RUNS in content else Feasibility()
        return cls(**values, setup=parse(setup, "json"), runs=runs)


def _feasibility(content: Mapping[str, Any]) -> Feasibility:
    """Read what ``Request.to_json`` has written."""
    queues, ctas = content["queues"], Ctas(*content["ctas"])
    own = None if queues is None else HardwareQueues(*queues)
    return Feasibility(**{**content, "queues": own, "ctas": ctas})


def plan(request: Request) -> Timeline:
    """Search for the shortest schedule and simulate it, as ``answered``."""
    return answered(request).timeline


def answered(request: Request) -> Answer:
    """Search for the shortest schedule that can run.

    Raises:
        UserError: for invalid costs, a memory limit that admits no schedule, or no schedule that can run.
    """
    figures = measured(CostsFile.parse(request.costs), request.num_ranks, request.num_microbatches)
    return answer(of_run(figures, request.setup, request.runs))


def main() -> int:
    """Answer the request on standard input and return the exit code."""
    os.nice(_LOWEST_PRIORITY)
    try:
        found = answered(Request.from_json(sys.stdin.read()))
        text = plan_to_json(found.timeline, more={MEMORY_LIMIT: found.within})
    except (UserError, OverflowError) as error:
        print(beyond_floats(error) if isinstance(error, OverflowError) else error, file=sys.stderr)
        return 2
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
