"""``zero-bubble trace``: draw recorded iterations next to their plans."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from megatron.zero_bubble.core.analysis.difference import ComparedIteration
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.trace import Recording, read_trace_file
from megatron.zero_bubble.core.render.html import render_html
from megatron.zero_bubble.core.render.perfetto import render_perfetto
from megatron.zero_bubble.core.render.svg import draw_comparison
from megatron.zero_bubble.core.render.text import headline


def add_trace(verb: argparse.ArgumentParser) -> None:
    """Add the flags of ``trace``."""
    verb.description = "Draw a recorded iteration next to its plan, and show which ranks and causes made it longer."
    verb.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="trace.json that a run with --zero-bubble-trace wrote; several are printed in turn, as text only",
    )
    verb.add_argument(
        "--iteration", type=int, metavar="N", help="number of the iteration to draw (default: the one of median length)"
    )
    verb.add_argument("--format", choices=tuple(_FORMATS), default="text", help="output format (default: text)")
    verb.add_argument("--output", type=Path, metavar="FILE", help="file to write (default: standard output)")
    verb.set_defaults(command=trace)


def trace(options: argparse.Namespace) -> str:
    """Format one iteration per file as ``--format`` requests; the returned text is empty with ``--output``."""
    if options.format != "text" and len(options.files) > 1:
        raise UserError(
            f"--format {options.format} draws one file; got {len(options.files)}; leave --format out or give one file"
        )
    parts = [_FORMATS[options.format](_chosen(read_trace_file(file), options.iteration)) for file in options.files]
    text = "\n".join(parts)
    if options.output is None:
        return text
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {options.output}: {error.strerror}; give another path") from None
    return ""


def _chosen(recording: Recording, iteration: int | None) -> ComparedIteration:
    number = recording.typical if iteration is None else iteration
    if number not in recording.traces:
        known = ", ".join(map(str, recording.traces))
        raise UserError(f"iteration {number} was not recorded; choose one of {known}")
    return recording.compared(number)


def _text(compared: ComparedIteration) -> str:
    """Format both headlines, the difference by cause, and one line per rank."""
    difference = compared.difference
    parts = (
        ("slow passes", difference.slow_ms),
        ("transfers", difference.transfer_ms),
        ("host gaps", difference.host_ms),
        ("slack used", difference.slack_ms),
    )
    lines = [
        f"iteration {compared.iteration}",
        f"planned   {headline(compared.planned)}",
        f"measured  {headline(compared.measured.timeline)}",
        f"measured minus planned: {difference.makespan_ms:+.2f} ms, along the critical chain "
        + ", ".join(f"{name} {value:+.2f}" for name, value in parts),
        "  rank   input late   host gaps   end        slow passes   (ms, measured minus planned)",
    ]
    lines += [
        f"  {rank:<4}   {part.late_ms:+10.2f}   {part.host_ms:+9.2f}   {part.end_ms:+8.2f}   {part.slow_ms:+11.2f}"
        for rank, part in enumerate(difference.ranks)
    ]
    return "\n".join(lines) + "\n"


_FORMATS: dict[str, Callable[[ComparedIteration], str]] = {
    "text": _text,
    "html": render_html,
    "svg": draw_comparison,
    "perfetto": render_perfetto,
}
