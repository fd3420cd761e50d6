"""Says where two runs of one seed may differ: with dropout, if the order of the passes depends on measured times."""

from __future__ import annotations

from collections.abc import Callable

from megatron.zero_bubble.integration.adapter.part import Call, Part


class DropoutNotice(Part):
    """Prints a line before the first training iteration of a model with dropout and several stages per rank.

    Such a rank draws the masks of all of its stages from one random state, in the order of its forwards.

    Args:
        say: prints the line; None on all ranks but one.
    """

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self._say = say

    def begin(self, call: Call) -> None:
        config = call.step.config
        drops = config.hidden_dropout > 0 or config.attention_dropout > 0
        if self._say is not None and drops and len(call.chunks) > 1 and not call.step.forward_only:
            self._say(
                "zb-auto: the order in which a rank draws the dropout masks of its stages follows the plan, and so "
                "measured times: two runs of one seed differ; to repeat one bit for bit, train without dropout, or "
                "run a schedule by name or a plan from a file"
            )
            self._say = None
