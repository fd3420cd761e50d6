"""Tables of the keys of a plan's JSON, one per feature with which they are written."""

from __future__ import annotations

from functools import partial

from megatron.zero_bubble.core.formats.plan_keys import PLAN_KEYS
from site_parts.markdown import code, table


def of_section(section: str) -> str:
    """The keys of a section; the last column says which of them a run takes from the file."""
    rows = [
        (code(key.name), key.form, key.meaning, "yes" if key.decides else "")
        for key in PLAN_KEYS
        if key.section == section
    ]
    return table(("key", "type", "meaning", "a run takes it"), rows)


PARTS = {
    f"plan-keys-{section}": partial(of_section, section) for section in dict.fromkeys(key.section for key in PLAN_KEYS)
}
