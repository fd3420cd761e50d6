"""What a layout by cost prints."""

from __future__ import annotations

from megatron.zero_bubble.core.formats.layout import stages_text
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.layout_plan import LayoutPlan


def layout_summary(plan: LayoutPlan, costs: Figures) -> str:
    """Format the layout as Megatron's flag, its layers by stage, and how much shorter it is than others."""
    best = plan.best
    lines = [layout_flag(best.text, costs), f"layers by stage: {stages_text(best.layers)}"]
    for name, gain in plan.gains().items():
        other = plan.others[name]
        more = "" if not other.excess else ", which exceeds the memory limit"
        least = "at least " if other.is_bound else ""
        lines.append(
            f"{least}{compared(gain)} the {name} ({costs.layout_words(other.text)[1]}, {least}{other.ms:.3f} ms){more}"
        )
    return "\n".join(lines) + "\n"


def layout_flag(layout: str, costs: Figures) -> str:
    """The flag that gives a job a layout."""
    flag, value = costs.layout_words(layout)
    return f"{flag} '{value}'"


def compared(gain: float) -> str:
    """Say how much shorter something is by a share, or longer."""
    return "as long as" if abs(gain) < 5e-5 else f"{gain:.2%} shorter than" if gain > 0 else f"{-gain:.2%} longer than"
