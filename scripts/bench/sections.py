"""The report of each bench: its rows, their columns, and the text about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

from bench.tables import Column, Figures, Getter, Section, measured, named, ratio, rounds, settings


def _whose(row: Figures) -> str:
    """A variant's name with the package that runs it."""
    who, name = row["schedule"].partition(" ")[::2]
    if who not in ("stock", "torch"):
        return f"{row['schedule']}, ours"
    package = {"stock": "megatron_core", "torch": "torch"}[who]
    runner = {"stock": "megatron-core", "torch": "torch.distributed.pipelining"}[who]
    return f"{name}, {runner} {row['machine'][package]}"


def _virtual(content: Figures) -> list[dict[str, Any]]:
    rows = []
    for num_ranks, cases in groupby(content["results"], lambda row: row["num_ranks"]):
        worst = [row["worst"][0] for row in cases]
        rows.append({"num_ranks": num_ranks, "cases": 3 * len(worst), "worst_ms": max(worst)})
    return rows


def _real(content: Figures) -> list[dict[str, Any]]:
    rows = []
    for result in content["results"]:
        of_all = {"num_microbatches": result["num_microbatches"], "machine": content["machine"]}
        of_all["stock_ms"] = result["variants"]["stock 1f1b"]["rounds_ms"]
        rows += [{**row, "schedule": name, **of_all} for name, row in result["variants"].items()]
    return rows


def _passes(*keys: str) -> Getter:
    """Getter of the time of these passes per microbatch over all stages; None for variants that are not recorded."""

    def get(row: Figures) -> dict[str, float] | None:
        times = [sum(sum(costs[key]) for key in keys) for costs in row.get("costs", ())]
        return measured(times) if times else None

    return get


def _wgrad(content: Figures) -> list[dict[str, Any]]:
    rows = []
    for result in content["results"]:
        times = {(row["weights"], row["variant"]): row["rounds_us"] for row in result["rows"]}
        for row in result["rows"]:
            if row["weights"] == "layer" or row["reference"] != "library":  # single weights are in the bench's JSON
                rows.append({**row, "reference_us": times[row["weights"], row["reference"]]})
    return rows


def _rollback(content: Figures) -> list[dict[str, Any]]:
    return [
        {**content["rollbacks"][name], "rollback": name, **{key: [times[key] for times in of_rounds] for key in _STEPS}}
        for name, of_rounds in content["by_round"].items()
    ]


def _scaling(content: Figures) -> list[dict[str, Any]]:
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for point in content["points"]:
        m, name = point["num_microbatches"], point["schedule"]
        row = rows.setdefault((m, name), {"num_microbatches": m, "schedule": name, "memory": content["memory"][name]})
        row[f"p={point['num_ranks']}"] = point["tokens_s"]
    return list(rows.values())


class _Thousands(Column):
    """Tokens per second with a synchronous optimizer, and with post-validation."""

    def cell(self, row: Figures) -> str:
        if row.get(self.key) is None:
            return "-"
        return " / ".join(f"{row[self.key][metric] / 1e3:.1f}" for metric in ("makespan", "span"))


def _scaling_columns(rows: Sequence[Figures]) -> list[Column]:
    sizes = [key for key in rows[0] if key.startswith("p=")]
    shown = sizes[::-2]  # every other one, the largest included
    head = [Column("microbatches", "num_microbatches"), Column("schedule", "schedule"), Column("peak memory", "memory")]
    return [*head, *(_Thousands(key if key in shown else "", key) for key in sizes)]


_STEPS = ("step_ms", "check_ms", "keep_ms", "undo_ms")
_GPT = settings("hidden_size", "seq_length", "dtype", "num_layers", "rounds", "device")
_GPT_WORDS = (
    "A GPT of hidden size {hidden_size} and {num_layers} layers in {dtype} ({device}), {seq_length} tokens per "
    "microbatch, without the optimizer, on %s; medians of {rounds} rounds, least and most in brackets. F ms and B + W "
    "ms are the time of one microbatch through all layers.{names}"
)
_REAL_WORDS = (
    _GPT_WORDS
    % "two ranks. The time of an iteration is divided by that of stock's in the same round. *Predicted* is the same "
    "ratio from the simulator, with the median passes and transfers of these rounds; *bound* is the lower bound of "
    "that prediction for any order of the passes"
)
_PASSES_WORDS = (
    _GPT_WORDS % "one rank, which never waits: stock's pipeline loop, and the same order of passes under our runtime"
)
_PASSES = (
    Column("schedule", "schedule", "", _whose),
    Column("ms / iteration", "iteration_ms", ".0f", rounds("rounds_ms")),
    Column("time / stock", "over_stock", ".3f", ratio("rounds_ms", "stock_ms")),
    Column("F ms", "forward_ms", ".1f", _passes("forward_ms")),
    Column("B + W ms", "backward_ms", ".1f", _passes("backward_ms", "wgrad_ms")),
)
_MEMORY = (
    Column("allocated GiB", "allocated_gib", ".1f"),
    Column("reserved GiB", "reserved_gib", ".1f"),
)
"""Peaks of an iteration on a GPU, on the rank where they are largest."""
_REAL = (
    Column("microbatches", "num_microbatches"),
    *_PASSES[:2],
    replace(_PASSES[2], name="time / stock 1F1B"),
    Column("predicted", "predicted_over_stock", ".3f", lambda row: row.get("predicted_time_over_stock")),
    Column("bound", "bound", ".3f", lambda row: row.get("bound_over_predicted_stock")),
    *_PASSES[3:],
)


def _others(figures: Figures) -> str:
    """The products of other packages among the rows, as the end of a sentence."""
    used = {row["variant"] for row in figures["rows"]} & {"apex", "transformer_engine"}
    return f'; {" and ".join(sorted(used))} accumulate as "fused" does' if used else ""


_WGRAD = Section(
    "Weight gradients",
    settings("hidden_size", "tokens", "rounds", "device", "threads"),
    _wgrad,
    (
        *(Column(name, key) for name, key in (("dtype", "dtype"), ("weights", "weights"), ("how", "variant"))),
        Column("us", "us", ".0f", rounds("rounds_us")),
        Column("GFLOPS", "gflops", ".0f"),
        Column("time / first", "over_reference", ".3f", ratio("rounds_us", "reference_us")),
    ),
    "The W of a whole layer (hidden size {hidden_size}, {tokens} tokens) on {device}, {threads} thread(s), compared "
    "with the library's bare matrix products. In float32 these accumulate into the gradient (beta=1); in narrow dtypes "
    'they accumulate nothing. "fused" is what this package does, "reference" the same in torch, and "unfused" what '
    "megatron-core does{others}. The last rows of a dtype compute several microbatches of one weight: one by one, as "
    "this package does, or folded into one product. Medians of {rounds} rounds, least and most in brackets.",
    lambda figures: {"others": _others(figures)},
)


_NAMES = {
    "split": "runs every backward as a B and a W",
    "exact": "computes the same bits as stock",
    "stream": "computes its weight gradients on a stream of their own",
    "fitted": "is the schedule fitted to these passes, in the same memory",
}
"""What the words in the name of a variant mean."""


def _names(figures: Figures) -> dict[str, str]:
    """Explain the words that occur in the names of the variants."""
    used = {word for row in figures["rows"] for word in row["schedule"].replace(",", "").split()}
    return {"names": "".join(f' "{word}" {what}.' for word, what in _NAMES.items() if word in used)}


_NONE_LOST = "its bubble was never more than 0.05 points larger"
"""The tolerance is that of ``peer_schedules``."""


def _peers(figures: Figures) -> dict[str, Any]:
    drawn = "all" if figures["questions"] == figures["of_questions"] else f"drawn at random, seed {figures['seed']}"
    lost = figures["lost"]
    return {"drawn": drawn, "result": f"{lost} comparisons were lost" if lost else _NONE_LOST}


_FOR_EQUAL_PASSES = ("zb-v", "v-half", "v-min")


def _scaled(figures: Figures) -> dict[str, Any]:
    """The assumptions as a list, and why the throughput of a schedule may rise with the number of ranks."""
    rising = set()
    for row in figures["rows"]:
        tokens = [row[key]["makespan"] for key in row if key.startswith("p=") and row[key]]
        if row["schedule"] in _FOR_EQUAL_PASSES and any(more > less for less, more in pairwise(tokens)):
            rising.add(row["schedule"])
    why = (
        f"\n\nThe throughput of {' and '.join(sorted(rising))} does not fall steadily with the number of ranks: its "
        "pattern was compacted for equal passes, which can change its order so that unequal passes wait in every "
        "microbatch; how long they wait depends on the number of ranks."
    )
    return {
        "thousands": figures["ideal_tokens_s"] / 1e3,
        "lines": "\n".join(f"* {assumption}" for assumption in figures["assumptions"]),
        "rising": why if rising else "",
    }


SECTIONS = {
    "emulated": Section(
        "Emulated compute",
        settings("num_ranks", "num_microbatches", "pass_ms", "kib", "transfer_ms", "rounds"),
        named("schedule", "variants"),
        (
            Column("schedule", "schedule", "", _whose),
            Column("planned ms", "planned_ms", ".0f"),
            Column("measured ms", "measured_ms", ".0f", rounds("rounds_ms")),
            Column("measured / planned", "over_planned", ".3f", ratio("rounds_ms", "planned_ms")),
        ),
        "{num_ranks} gloo ranks on {machine[cores]} cores, {num_microbatches} microbatches, passes that sleep (F "
        "{f:g}, B {b:g}, W {w:g} ms on a rank, of which each stage has an equal part), real messages of {kib} KiB that "
        "take {transfer_ms:.2f} ms in the plans. What exceeds the plan is runtime overhead, transfers, and the "
        "scheduling of {num_ranks} processes by the operating system. Every round runs each schedule once; medians of "
        "{rounds} rounds, least and most in "
        "brackets.",
        lambda of: dict(zip("fbw", of["pass_ms"] * (3 // len(of["pass_ms"])), strict=True)),
    ),
    "virtual": Section(
        "Executed order, compared with the plan",
        settings(),
        _virtual,
        (
            Column("ranks", "num_ranks"),
            Column("cases", "cases"),
            Column("largest difference, ms", "worst_ms", ".6f"),
        ),
        "Start and end of every pass as executed, on virtual clocks that travel with the tensors and see no overhead, "
        "compared with the plan: every schedule, with 1, p and 3p microbatches and three ratios of costs.",
    ),
    "tracing": Section(
        "Recorded iterations",
        settings("num_ranks", "num_microbatches", "pass_ms", "rounds"),
        named("schedule", "schedules"),
        (
            Column("schedule", "schedule"),
            Column("bubble by the wall clock, %", "wall", ".2f", rounds("wall_bubbles", 100)),
            Column("bubble by the trace, %", "trace", ".2f", rounds("trace_bubbles", 100)),
            Column("largest difference, points", "apart", ".2f", lambda row: 100 * row["apart"]),
            Column("overhead of recording, %", "overhead", "+.2f", rounds("overheads", 100)),
        ),
        "{num_ranks} gloo ranks, {num_microbatches} microbatches, passes that sleep {pass_ms:g} ms. The bubble "
        "(makespan) of recorded iterations is computed twice, from the wall clock and from the trace. The overhead is "
        "how much longer an iteration takes when it is recorded; negative values are noise. {rounds} rounds of both.",
    ),
    "real-compute": Section(
        "Real compute",
        _GPT,
        _real,
        _REAL,
        _REAL_WORDS,
        _names,
    ),
    "passes": Section("Pass times", _GPT, _real, _PASSES, _PASSES_WORDS, _names),
    "passes-cuda": Section("Pass times on a GPU", _GPT, _real, (*_PASSES, *_MEMORY), _PASSES_WORDS, _names),
    "real-compute-cuda": Section("Real compute on GPUs", _GPT, _real, (*_REAL, *_MEMORY), _REAL_WORDS, _names),
    "wgrad": _WGRAD,
    "wgrad-cuda": replace(_WGRAD, title="Weight gradients on a GPU"),
    "post-validation": Section(
        "With the optimizer",
        settings("num_ranks", "num_microbatches", "pass_ms", "step_ms", "rounds"),
        named("optimizer", "optimizers"),
        (
            Column("optimizer", "optimizer", "", lambda row: row["optimizer"].replace("ahead", "post-validation")),
            Column("predicted ms", "predicted_ms", ".0f"),
            Column("measured ms", "measured_ms", ".0f", rounds("rounds_ms")),
            Column("measured / predicted", "over_predicted", ".3f", ratio("rounds_ms", "predicted_ms")),
        ),
        "Time from one iteration to the next, including the optimizer: {num_ranks} gloo ranks, {num_microbatches} "
        "microbatches, passes that sleep {pass_ms:g} ms, a step of {step_ms:g} ms, `zb-auto` with twice 1F1B's memory; "
        "medians of {rounds} rounds.",
    ),
    "rollback": Section(
        "Undoing an optimizer step",
        settings("device", "elements", "rounds"),
        _rollback,
        (
            Column("rollback", "rollback"),
            *(Column(key.replace("_", " "), key, ".1f", rounds(key)) for key in _STEPS),
            Column("bytes per element", "bytes_per_element", ".1f"),
        ),
        "Undoing a step of AdamW over {elements:,} elements, on {device}, compared with the step itself; medians of "
        "{rounds} rounds.",
    ),
    "peers": Section(
        "zb-auto against public schedules",
        lambda content: (
            settings("questions", "of_questions", "schedules", "of_schedules", "seed")(content)
            | {"lost": len(content["lost"])}
        ),
        lambda content: content["medians"],
        (
            *(Column(key, key) for key in ("objective", "memory")),
            Column("problems", "questions"),
            Column("zb-auto", "ours", ".1%"),
            Column("", "ours_quartiles"),
            Column("best public", "best_peer", ".1%"),
            Column("", "best_peer_quartiles"),
            Column("bound", "bound", ".1%"),
            Column("seconds to plan", "seconds", ".1f"),
        ),
        "`zb-auto` against {schedules} of {of_schedules} schedules of public schedulers (the authors' fork, Primus, "
        "DualPipeV). Each was planned for certain costs and a certain peak memory; together these are "
        "{of_questions} planning problems. `zb-auto` solved {questions} of them ({drawn}), each by span and by "
        "makespan; {result}. Median bubble rates, with quartiles, by memory limit (1 p: the peak of 1F1B), "
        "next to the lower bound for any schedule.",
        _peers,
    ),
    "scaling": Section(
        "Predicted scaling",
        settings("assumptions", "ideal_tokens_s"),
        _scaling,
        _scaling_columns,
        "![Predicted throughput over pipeline ranks](scaling.svg)\n\nPredicted, not measured. The figures are "
        "thousands of tokens per second of the whole pipeline: with a synchronous optimizer / with post-validation. "
        "Without bubbles it would be {thousands:.1f}. Every schedule was simulated pass by pass. "
        "Assumptions:\n\n{lines}\n\nEach published schedule gets its own peak as its memory limit. zb-h2 needs about "
        "twice 1F1B's activations, zb-v and zb-h1 as many as 1F1B. With many ranks, v-half needs about a half of them "
        "and v-min about a third; with few ranks they need more.{rising}",
        _scaled,
    ),
}
"""Sections by the name of the bench, in the order of the page."""
