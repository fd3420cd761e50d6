"""The table of the facts of a job."""

from __future__ import annotations

from megatron.zero_bubble.core.formats.facts import FACTS
from site_parts.markdown import code, table


def of_job() -> str:
    """The facts, and the files that have them."""
    everywhere, once = "costs, plan, decision", "decision"
    return table(
        ("fact", "meaning", "file"),
        [(code(fact.name), fact.words, everywhere if fact.of_passes else once) for fact in FACTS],
    )


PARTS = {"facts": of_job}
