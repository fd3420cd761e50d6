"""Advice as text and as JSON."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron.zero_bubble.cli.assumed_vocabulary import OtherVocabSize, remark
from megatron.zero_bubble.core.formats.pattern import Pattern
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.search.placements import name_of
from megatron.zero_bubble.planning.change import NUMBERS, AdviceRow, Today
from megatron.zero_bubble.planning.codecs import Difference, difference
from megatron.zero_bubble.planning.experts import Contender, kind_of, sentence
from megatron.zero_bubble.planning.idle import Idle, idle_of
from megatron.zero_bubble.planning.job.arguments.parser import misspelt
from megatron.zero_bubble.planning.job.pattern import FLAG as PATTERN
from megatron.zero_bubble.planning.job.pattern import pattern_in
from megatron.zero_bubble.planning.remedies import Remedied
from megatron.zero_bubble.planning.setup import Given, Setup
from megatron.zero_bubble.planning.uncertainty import SHARE
from megatron.zero_bubble.planning.worth import Advice, Barred

_GIB = 2**30
_MEASURED = 10
"""Iterations of a job that only measures; the last of them are recorded."""
_NOT_COVERED = (
    "No figure or range covers the host's time for its launches, ranks that slow each other down, the optimizer step, "
    "and reductions over replicas that backwards do not hide."
)
_LAYOUT = "--pipeline-model-parallel-layout"
_FEW = 2
"""Up to so many refused changes have no common reason."""


class Batch(NamedTuple):
    """The batch of a job.

    Attributes:
        tokens: tokens of an iteration, on all GPUs.
        gpus: number of GPUs.
        replicas: number of data-parallel replicas.
        operations: floating-point operations per token; None if unknown.
        peak: dense peak of a GPU in the precision of linear layers, in TFLOPS.
    """

    tokens: int
    gpus: int
    replicas: int
    operations: float | None = None
    peak: float = 0.0

    def rate(self, ms: float) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.gpus / (ms / 1e3)

    def tflops(self, ms: float) -> float | None:
        """TFLOP/s per GPU, as logs of training count them; None if unknown."""
        return None if self.operations is None else self.operations * self.rate(ms) / 1e12

    def utilization(self, ms: float) -> float | None:
        """The share of the peak that the model's operations take (MFU); None if unknown."""
        tflops = self.tflops(ms)
        return None if tflops is None or not self.peak else tflops / self.peak


def words_of(setup: Setup, adds: Sequence[str], drops: Sequence[str], own: Setup, argv: Sequence[str]) -> Difference:
    """The flags that a job adds, and those that it leaves out, to run another setup.

    Args:
        adds, drops: flags of Megatron's own that it adds and leaves out besides.
        own: what the job runs now.
    """
    add, obsolete = _spelled(difference(own, setup), pattern_in(argv))
    words = (*add, *adds)
    all_drops = dict.fromkeys((*drops, *obsolete))
    return Difference(words, tuple(given_of([flag for flag in all_drops if flag not in words], argv)))


def _spelled(found: Difference, pattern: Pattern | None) -> Difference:
    """The same with the stages of a hybrid model in its pattern, which a job always has."""
    add = list(found.add)
    if pattern is None or _LAYOUT not in (*add, *found.leave_out):
        return found
    layout = None
    if _LAYOUT in add:
        at = add.index(_LAYOUT)
        layout = add[at + 1]
        del add[at : at + 2]
    left = tuple(flag for flag in found.leave_out if flag != _LAYOUT)
    return Difference((*add, pattern.flag, pattern.laid_out(layout)), left)


def words_of_row(row: AdviceRow, own: Setup, argv: Sequence[str]) -> Difference:
    """The same for a planned change."""
    return words_of(row.setup, row.change.adds, row.change.drops, own, argv)


def content_of(
    found: Advice,
    batch: Batch,
    own: Setup,
    argv: Sequence[str],
    unread: Sequence[str] = (),
    behind: Remedied | None = None,
) -> dict[str, Any]:
    """Return what ``--format json`` prints: the job, the advised changes, and whether one is worth it."""
    timeline, costs, need = found.today
    ms, best = timeline.makespan_ms, found.best
    return {
        "job": {
            "schedule": timeline.schedule.name,
            "num_ranks": costs.num_ranks,
            "num_microbatches": costs.num_microbatches,
            "makespan_ms": ms,
            "memory_bytes": need.most if costs.in_bytes else None,
            "bubble_rate": timeline.bubble_rate("makespan"),
            "idle": {name: value / ms for name, value in _idle(found.today)._asdict().items()},
            "tokens_per_s_per_gpu": batch.rate(ms),
            "tflops_per_gpu": batch.tflops(ms),
            "mfu": batch.utilization(ms),
            "notes": costs.notes,
            "not_read": unread,
        },
        "advice": [_row(row, words_of_row(row, own, argv), costs.in_bytes) for row in found.rows],
        "worth_it": best is not None,
        "worth": found.worth,
        "is_estimated": found.is_estimated,
        "best": None if best is None else found.rows.index(best) + 1,
        "gain_range": found.gain_range,
        "dropped": [{"name": each.name, "reason": each.reason} for each in found.dropped],
        "left_out": found.left_out,
        "barred": [each._asdict() for each in found.barred],
        "with_remedy": None
        if behind is None or (remedied := behind.advice.best) is None
        else _row(remedied, words_of_row(remedied, own, argv), costs.in_bytes),
    }


def _row(row: AdviceRow, words: Difference, in_bytes: bool) -> dict[str, Any]:
    return {
        "name": row.change.name,
        "best_at": row.titles,
        "flags": words.add,
        "environment": row.environment,
        "activation_limit": _limit_text(row, in_bytes),
        "placement": name_of(row.change.placement),
        "num_chunks": row.change.placement.num_stages // row.change.placement.num_ranks,
        "leave_out": words.leave_out,
        "makespan_ms": row.timeline.makespan_ms,
        "gain": row.gain,
        "gap": row.gap,
        "memory_bytes": row.need.most if in_bytes else None,
        "bits": NUMBERS[row.change.numbers],
    }


def _limit_text(row: AdviceRow, in_bytes: bool) -> str:
    """The memory limit of activations that the row was planned for, or that it needs where bytes are not known."""
    costs, limit = row.plan.costs, row.plan.question.limit
    if in_bytes and limit is not None:
        return f"{math.floor(limit / _GIB * 100) / 100}GiB"
    return f"{max(1.0, max(row.need.activations) / costs.peak_of_1f1b):.4g}p"


def given_of(flags: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return those of the flags that a job gives."""
    given = {word.partition("=")[0] for word in argv}
    return [flag for flag in flags if flag in given]


def text_of_job(today: Today, batch: Batch, capacity: float | None) -> str:
    """Return what ``advise`` prints at once: the assumptions, and the job as it is."""
    timeline, costs, need = today
    ms, idle, size = timeline.makespan_ms, _idle(today), f"{costs.num_ranks} pipeline ranks"
    causes = (
        f"{idle.warm_up / ms:.1%} while the pipeline fills and drains",
        f"{idle.imbalance / ms:.1%} because their work differs",
        f"{idle.transfers / ms:.1%} in transfers",
    )
    sizes = f"{size}, {costs.num_microbatches} microbatches, {batch.replicas} data-parallel replicas"
    lines = [*costs.notes, "", f"The job as it is: {timeline.schedule.name}, {sizes}"]
    speed = f"{batch.rate(ms):,.0f} tokens per second and GPU"
    if (tflops := batch.tflops(ms)) is not None and (share := batch.utilization(ms)) is not None:
        speed += f", {tflops:,.0f} TFLOP/s per GPU ({share:.1%} MFU)"
    lines.append(f"  {ms:,.1f} ms for the passes of an iteration, {speed}")
    lines.append(f"  ranks idle {idle.total / ms:.1%} of the time: {', '.join(causes)}")
    if costs.in_bytes and capacity is not None:
        at = need.fullest
        weights, kept, messages = (part[at] / _GIB for part in (need.weights, need.activations, need.messages))
        parts = f"{weights:.1f} of weights and optimizer, {kept:.1f} of activations, {messages:.2f} of messages"
        fullest = f"{need.most / _GIB:.1f} GiB on the fullest rank, {at}"
        lines.append(f"  {fullest}: {parts}; plans may take {capacity / _GIB:.1f} GiB")
    return "\n".join(lines)


def text_of(
    found: Advice,
    own: Setup,
    argv: Sequence[str],
    unread: Sequence[str] = (),
    behind: Remedied | None = None,
    others: Sequence[OtherVocabSize] = (),
) -> str:
    """Return what ``advise`` prints after planning: a table, the flags of each row, and one sentence of advice.

    Args:
        own: what the job runs now.
        unread: flags that are not checked here.
        behind: what the job gains without what refuses most of its changes.
        others: the same with other vocabularies, if the job's is assumed.
    """
    lines = ["", _of_all_to_alls(found)] if found.today.costs.of_ranks[0].has_all_to_alls else []
    if found.barred:
        lines += ["", *(f"Shorter, but not for this job as it is: {_barred(each)}" for each in found.barred)]
    if found.rows:
        lines += ["", *_table(found, own, argv)]
    measure = [_how_to_measure(found.today.timeline.schedule)] if found.is_estimated else []
    rests = [remark(others)] if others else []
    stands = _behind(found, behind, own, argv)
    if behind is not None and behind.remedy.is_counted and _gain(behind.advice) > _gain(found) + found.worth:
        advice = _verdict(behind.advice, own, argv, ())
    else:
        of_others = [each.gain for each in others if each.gain is not None]
        advice = _verdict(found, own, argv, of_others, bool(found.barred or stands))
    remarks = _remarks(found, unread, stands)
    return "\n".join([*lines, "", *remarks, advice, *rests, _NOT_COVERED, *measure]) + "\n"


def _idle(today: Today) -> Idle:
    return idle_of(today.timeline, today.costs.on(today.timeline.schedule.placement)[0])


def _of_all_to_alls(found: Advice) -> str:
    """The share of the all-to-all, and the shortest schedules that the job can run, with pairs and without."""
    of_kinds: dict[str, Contender] = {}
    for row in found.rows:
        schedule, name = row.plan.schedule, row.change.name
        if row.gain > 0:
            kind, what = kind_of(name, schedule)
            of_kinds.setdefault(kind, Contender(what, row.ms, row.plan.costs.show(max(row.need.activations))))
    return sentence(found.today.costs, found.objective, tuple(of_kinds.values()))


def _table(found: Advice, own: Setup, argv: Sequence[str]) -> Iterator[str]:
    width, in_bytes = max(len(row.change.name) for row in found.rows), found.today.costs.in_bytes
    yield f"{'':3}{'change':{width}}{'ms':>12}{'time':>8}{'GiB' if in_bytes else '':>8}  the best at"
    for number, row in enumerate(found.rows, 1):
        gib = f"{row.need.most / _GIB:8.1f}" if in_bytes else f"{'':8}"
        best = ", ".join(row.titles)
        yield f"{number:<3}{row.change.name:{width}}{row.ms:12,.1f}{-row.gain:+8.1%}{gib}  {best}"
    for number, row in enumerate(found.rows, 1):
        words = words_of_row(row, own, argv)
        yield ""
        yield f"{number:<3}add {shlex.join(words.add)}"
        if isinstance(row.setup.order, Given):
            yield f"   the file: ask again with --write {row.setup.order.file} --row {number}"
        if row.environment:
            yield f"   start it with {' '.join(row.environment)}"
        if words.leave_out:
            yield f"   leave out {' '.join(words.leave_out)}"
        yield f"   numbers: {NUMBERS[row.change.numbers]}"
        if _LAYOUT in words.add or PATTERN in words.add:
            yield "   checkpoints: ranks save other layers than now, because the layout differs"
        if row.gap is not None:
            yield f"   time: within {row.gap:.1%} of a lower bound on such plans"


def not_read(unread: Sequence[str]) -> Iterator[str]:
    """Name the flags of a job that only Megatron-LM reads, and those that are probably misspelt."""
    if not unread:
        return
    yield f"Not checked here, only by Megatron-LM: {' '.join(unread)}"
    for flag, meant in misspelt(unread):
        yield f"{flag} is no flag that is known here; did you mean {meant}?"


def _remarks(found: Advice, unread: Sequence[str], behind: str) -> Iterator[str]:
    """What was not read and not planned.

    Args:
        behind: what stands in the way of most changes, as a sentence, if it does.
    """
    yield from not_read(unread)
    reasons = Counter(each.reason for each in found.dropped)
    rule, count = reasons.most_common(1)[0] if reasons else ("", 0)
    if behind:
        yield behind
    elif count > max(_FEW, len(found.dropped) // 2):
        yield f"{count} of {len(found.dropped)} more changes are refused for one reason: {rule.splitlines()[0]}"
    elif found.dropped:
        what = (
            "change would be refused for this job, or has"
            if len(found.dropped) == 1
            else ("changes would be refused for this job, or have")
        )
        yield f"{len(found.dropped)} more {what} no plan; --format json gives the reasons."
    if found.left_out:
        yield "Left out, because enough was searched for:"
        yield from (f"  {name}" for name in found.left_out)


def _behind(found: Advice, behind: Remedied | None, own: Setup, argv: Sequence[str]) -> str:
    """What stands in the way of changes, and what they would gain without it; "" if nothing is gained."""
    if behind is None or (behind.advice.best is None and not behind.advice.barred):
        return ""
    text = (
        f"{behind.refused} of {len(found.dropped)} more changes are refused for one reason: "
        f"{behind.reason.splitlines()[0]}. Without it, "
    )
    if (row := behind.advice.best) is None:
        return f"{text}{_barred(behind.advice.barred[0])}"
    words = words_of_row(row, own, argv)
    gib = f", {row.need.most / _GIB:.1f} GiB" if found.today.costs.in_bytes else ""
    without = f", and leave out {' '.join(words.leave_out)}" if words.leave_out else ""
    saved = "" if behind.remedy.is_counted else ", but for what the option itself saves"
    return (
        f"{text}{row.change.name} would take {row.ms:,.1f} ms ({-row.gain:+.1%}){gib}{saved}: add "
        f"{shlex.join(words.add)}{without}"
    )


def _barred(plan: Barred) -> str:
    return f"{plan.name}, {plan.ms:,.1f} ms: {plan.why}"


def _gain(found: Advice) -> float:
    return 0.0 if found.best is None else found.best.gain


def _memory_of(change: float) -> str:
    return ", the same memory" if abs(change) < 0.05 * _GIB else f", {change / _GIB:+.1f} GiB"


def _how_to_measure(schedule: Schedule) -> str:
    """How to replace estimates, with a schedule on the stages of the job."""
    name = "zb-h1" if schedule.num_stages == schedule.num_ranks else "zb-interleaved"
    more = f"--exit-interval {_MEASURED}"
    return (
        f"These are estimates. To measure, run the job with --zero-bubble-schedule {name} --zero-bubble-record-costs "
        f"costs.json {more} added, which ends it after {_MEASURED} iterations; then ask again "
        "with --costs costs.json. With the time of an iteration in the log of any run, give --measured-ms."
    )


def _verdict(
    found: Advice, own: Setup, argv: Sequence[str], of_others: Sequence[float], is_barred: bool = False
) -> str:
    """One sentence of advice.

    Args:
        of_others: what the advised change gains with other vocabularies, if the job's is assumed.
        is_barred: whether what the job cannot run as it is would gain something.
    """
    best, today = found.best, found.today
    name = today.timeline.schedule.name
    if best is None:
        share = max((row.gain for row in found.rows if row.fits), default=0.0)
        gains = "no change gains anything"
        if share > 0:
            gains = f"the best change gains {share:.1%}"
        elif found.num_planned == 0 and found.dropped:
            gains = "no change could be planned"
            gains += "" if is_barred else ", so that nothing is known of what one gains"
        elif found.dropped or found.left_out:
            what = "the only change" if found.num_planned == 1 else f"the {found.num_planned} changes"
            gains = f"{what} that could be planned would gain nothing"
        stay = "As the job is, stay" if is_barred else "Stay"
        idle = _idle(today).total / today.timeline.makespan_ms
        return (
            f"{stay} with {name}: its ranks idle {idle:.1%} of the time, and {gains}; a change is worth it from "
            f"{found.worth:.0%}."
        )
    bound = "" if best.gap is None else f" By a lower bound, no plan of this kind is more than {best.gap:.1%} shorter."
    more = _memory_of(best.need.most - today.need.most) if today.costs.in_bytes else ""
    varied = ""
    if found.gain_range is not None:
        least, most = min([*found.gain_range, *of_others]), max([*found.gain_range, *of_others])
        between = f"{-least:+.1%}" if f"{least:.1%}" == f"{most:.1%}" else f"{-least:+.1%} to {-most:+.1%}"
        other = ", or the vocabulary is another" if of_others else ""
        varied = f" ({between} if all F, B, W or transfers take {SHARE:.0%} more or less{other})"
    start = f" and start it with {' '.join(best.environment)}" if best.environment else ""
    fastest = min((row for row in found.rows if row.fits), key=lambda row: row.ms)
    if best is not fastest:
        bound = f" It is simpler than {fastest.change.name}, which is {fastest.gain - best.gain:.1%} shorter.{bound}"
    words = shlex.join(words_of_row(best, own, argv).add)
    if isinstance(best.setup.order, Given):
        words += f", the file that --write {best.setup.order.file} writes,"
    return (
        f"Add {words}{start}: {-best.gain:+.1%} of the time of the passes{varied}{more}. Its numbers are "
        f"{NUMBERS[best.change.numbers]}.{bound}"
    )
