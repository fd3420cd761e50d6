"""What the page says of each bench: which of its figures, in which words, beside what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.columns import Column, Figures, Section, fixed, measured, number, pick, ratios, text, whose

# --- passes that only take time -------------------------------------------------------------------------------------


def _emulated(content: Figures) -> dict[str, Any]:
    rows = [
        {
            "schedule": whose(name, content["machine"]),
            "planned_ms": variant["planned_ms"],
            "measured_ms": measured(variant["rounds_ms"]),
            "over_planned": measured([ms / variant["planned_ms"] for ms in variant["rounds_ms"]]),
        }
        for name, variant in content["variants"].items()
    ]
    return pick(content, "num_ranks", "num_microbatches", "pass_ms", "kib", "rounds") | {"rows": rows}


def _emulated_words(figures: Figures, machine: Figures) -> str:
    f, b, w = figures["pass_ms"] * (3 // len(figures["pass_ms"]))
    return (
        f"{figures['num_ranks']} gloo ranks on {machine['cores']} cores, {figures['num_microbatches']} microbatches, "
        f"passes that sleep (F {f:g}, B {b:g}, W {w:g} ms on a rank, half of it for each stage where a rank has two), "
        f"real messages of {figures['kib']} KiB: all above the plan is the runtime's own. Every round runs each "
        f"schedule once; medians of {figures['rounds']} rounds, least and most in brackets."
    )


def _virtual(content: Figures) -> dict[str, Any]:
    sizes = sorted({row["num_ranks"] for row in content["results"]})
    rows = []
    for num_ranks in sizes:
        of = [row["worst"][0] for row in content["results"] if row["num_ranks"] == num_ranks]
        rows.append({"num_ranks": num_ranks, "cases": 3 * len(of), "worst_ms": max(of)})
    return {"kib": content["kib"], "rows": rows}


def _virtual_words(figures: Figures, _: Figures) -> str:
    return (
        "What the runtime executes, on clocks that travel with the tensors and see no overhead, against the plan: "
        "every schedule, with 1, p and 3p microbatches and three ratios of costs, start and end of every pass."
    )


def _tracing(content: Figures) -> dict[str, Any]:
    percent = {"wall": "wall_bubbles", "trace": "trace_bubbles", "overhead": "overheads"}
    rows = [
        {"schedule": name, "apart": 100 * row["apart"]}
        | {key: measured([100 * part for part in row[rounds]]) for key, rounds in percent.items()}
        for name, row in content["schedules"].items()
    ]
    return pick(content, "num_ranks", "num_microbatches", "pass_ms", "rounds") | {"rows": rows}


def _tracing_words(figures: Figures, _: Figures) -> str:
    return (
        f"The bubble by the makespan of recorded iterations, from the wall clock and from the trace: "
        f"{figures['num_ranks']} gloo ranks, {figures['num_microbatches']} microbatches, passes that sleep "
        f"{figures['pass_ms']:g} ms; and how much longer an iteration took than one that was not recorded, in "
        f"{figures['rounds']} rounds of both."
    )


# --- real passes ----------------------------------------------------------------------------------------------------


def _real(content: Figures) -> dict[str, Any]:
    rows = []
    for result in content["results"]:
        stock = result["variants"]["stock 1f1b"]["rounds_ms"]
        for name, variant in result["variants"].items():
            rows.append(
                {
                    "num_microbatches": result["num_microbatches"],
                    "schedule": whose(name, content["machine"]),
                    "iteration_ms": measured(variant["rounds_ms"]),
                    "over_stock": ratios(variant["rounds_ms"], stock),
                    "predicted_over_stock": variant.get("predicted_time_over_stock"),
                    "bound": variant.get("bound_over_predicted_stock"),
                    **_pass_times(variant.get("costs", [])),
                }
            )
    first = content["results"][0]
    return pick(first, "hidden_size", "num_layers", "rounds") | {"device": content["device"], "rows": rows}


def _pass_times(costs: Sequence[Figures]) -> dict[str, Any]:
    """Of a microbatch through all stages, where a variant's passes were recorded."""
    if not costs:
        return {}
    forward = [sum(of["forward_ms"]) for of in costs]
    backward = [sum(of["backward_ms"]) + sum(of["wgrad_ms"]) for of in costs]
    return {"forward_ms": measured(forward), "backward_ms": measured(backward)}


def _real_words(figures: Figures, _: Figures) -> str:
    is_fitted = any(" fitted" in row["schedule"] for row in figures["rows"])
    return (
        f"{_gpt(figures)} on two ranks. One iteration over stock's in the same round, beside what the simulator "
        "predicts from the median passes and transfers of these rounds, and the bound of that prediction for any order "
        f"of such passes; {_rounds(figures)}" + ' "fitted" is made for these passes, in the same memory.' * is_fitted
    )


def _passes_words(figures: Figures, _: Figures) -> str:
    return (
        f"{_gpt(figures)} on one rank, where nothing waits: the pipeline's loop of stock, and the same with every "
        f"backward split; {_rounds(figures)}"
    )


def _gpt(figures: Figures) -> str:
    return (
        f"A GPT of hidden size {figures['hidden_size']} and {figures['num_layers']} layers ({figures['device']}), 256 "
        "tokens a microbatch, without the optimizer,"
    )


def _rounds(figures: Figures) -> str:
    return (
        f"medians of {figures['rounds']} rounds, least and most in brackets. F, and B with W: a microbatch through all "
        'layers. "exact" has the bits of stock.'
    )


def _wgrad(content: Figures) -> dict[str, Any]:
    rows = []
    for result in content["results"]:
        rounds = {(row["weights"], row["variant"]): row["rounds_us"] for row in result["rows"]}
        for row in result["rows"]:
            if row["weights"] != "layer" and row["reference"] == "library":
                continue  # single weights are in the bench's JSON
            own = rounds[row["weights"], row["variant"]]
            rows.append(
                pick(row, "dtype", "weights", "variant", "gflops", "reference")
                | {"us": measured(own), "over_reference": ratios(own, rounds[row["weights"], row["reference"]])}
            )
    return (
        pick(content, "hidden_size", "tokens", "rounds")
        | pick(content["machine"], "device", "threads")
        | {"rows": rows}
    )


def _wgrad_words(figures: Figures, _: Figures) -> str:
    return (
        f"The W of a whole layer (hidden size {figures['hidden_size']}, {figures['tokens']} tokens) on "
        f"{figures['device']}, {figures['threads']} thread(s), over the library's bare GEMMs: in float32 with beta=1, "
        'in narrow dtypes a plain product that accumulates nothing. "unfused" is what upstream does. The last rows of '
        "a dtype compute several microbatches of one weight one by one, or folded into one GEMM; medians of "
        f"{figures['rounds']} rounds, least and most in brackets."
    )


# --- the optimizer --------------------------------------------------------------------------------------------------


def _period(content: Figures) -> dict[str, Any]:
    rows = [
        {
            "optimizer": {"ahead": "post-validation"}.get(name, name),
            "predicted_ms": row["predicted_ms"],
            "measured_ms": measured(row["rounds_ms"]),
            "over_predicted": measured([ms / row["predicted_ms"] for ms in row["rounds_ms"]]),
        }
        for name, row in content["optimizers"].items()
    ]
    return pick(content, "num_ranks", "num_microbatches", "pass_ms", "step_ms", "rounds") | {"rows": rows}


def _period_words(figures: Figures, _: Figures) -> str:
    return (
        f"From one iteration to the next with the optimizer between them: {figures['num_ranks']} gloo ranks, "
        f"{figures['num_microbatches']} microbatches, passes that sleep {figures['pass_ms']:g} ms, a step of "
        f"{figures['step_ms']:g} ms, `zb-auto` in twice 1F1B's memory; medians of {figures['rounds']} rounds."
    )


def _rollback(content: Figures) -> dict[str, Any]:
    steps = ("step_ms", "check_ms", "keep_ms", "undo_ms")
    rows = [
        {"rollback": name, "bytes_per_element": content["rollbacks"][name]["bytes_per_element"]}
        | {key: measured([one[key] for one in rounds]) for key in steps}
        for name, rounds in content["by_round"].items()
    ]
    return pick(content, "device", "elements", "rounds") | {"rows": rows}


def _rollback_words(figures: Figures, _: Figures) -> str:
    return (
        f"How a step of AdamW over {figures['elements']:,} elements is taken back, on {figures['device']}; medians of "
        f"{figures['rounds']} rounds, beside the step itself."
    )


# --- planning -------------------------------------------------------------------------------------------------------


def _peers(content: Figures) -> dict[str, Any]:
    sizes = pick(content, "questions", "of_questions", "schedules", "of_schedules", "seed")
    return sizes | {"lost": len(content["lost"]), "rows": content["medians"]}


def _peers_words(figures: Figures, _: Figures) -> str:
    drawn = "all" if figures["questions"] == figures["of_questions"] else f"drawn at random, seed {figures['seed']}"
    return (
        f"`zb-auto` against {figures['schedules']} of {figures['of_schedules']} schedules of public schedulers (the "
        f"authors' fork, Primus, DualPipeV), each time with the same costs and in the same memory "
        f"({figures['questions']} of {figures['of_questions']} questions, {drawn}), by the span and by the makespan: "
        f"{figures['lost'] or 'no'} comparisons lost. Median bubble rates, with quartiles, by what a rank may keep (1 "
        "p: what 1F1B keeps), beside what no schedule can beat."
    )


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _rate(key: str) -> Callable[[Figures], str]:
    def cell(row: Figures) -> str:
        low, high = row[f"{key}_quartiles"]
        return f"{_percent(row[key])} ({_percent(low)} to {_percent(high)})"

    return cell


def _scaling(content: Figures) -> dict[str, Any]:
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for point in content["points"]:
        m, name = point["num_microbatches"], point["schedule"]
        row = rows.setdefault((m, name), {"num_microbatches": m, "schedule": name, "memory": content["memory"][name]})
        row[f"p={point['num_ranks']}"] = point["tokens_s"]
    counts = sorted({point["num_ranks"] for point in content["points"]})
    kept = pick(content, "assumptions", "ideal_tokens_s")
    return kept | {"counts": counts, "rows": list(rows.values())}


def _scaling_words(figures: Figures, _: Figures) -> str:
    return (
        "![Predicted throughput over pipeline ranks](scaling.svg)\n\nPredicted, not measured: thousands of tokens a "
        f"second of the whole pipeline, {figures['ideal_tokens_s'] / 1e3:.1f} without bubbles, with a synchronous "
        "optimizer / with post-validation. Every schedule was simulated pass by pass. Assumed:\n\n"
        + "\n".join(f"* {line}" for line in figures["assumptions"])
        + "\n\nWhat a schedule keeps is its limit: zb-h2 needs about twice 1F1B's activations, zb-v's and zb-h1's are "
        "1F1B's, v-half and v-min need a half and a third."
    )


def _scaling_columns(figures: Figures) -> list[Column]:
    def at(num_ranks: int) -> Column:
        def cell(row: Figures) -> str:
            tokens = row[f"p={num_ranks}"]
            return f"{tokens['makespan'] / 1e3:.1f} / {tokens['span'] / 1e3:.1f}"

        return Column(f"p={num_ranks}", cell)

    shown = figures["counts"][::-2][::-1]  # every other one, the largest included
    head = [Column("microbatches", text("num_microbatches")), Column("schedule", text("schedule"))]
    return [*head, Column("keeps", text("memory")), *map(at, shown)]


_REAL = fixed(
    Column("microbatches", text("num_microbatches")),
    Column("schedule", text("schedule")),
    Column("ms / iteration", number("iteration_ms", ".0f")),
    Column("time / stock 1F1B", number("over_stock", ".3f")),
    Column("predicted", number("predicted_over_stock", ".3f")),
    Column("bound", number("bound", ".3f")),
    Column("F ms", number("forward_ms", ".1f")),
    Column("B + W ms", number("backward_ms", ".1f")),
)
_PASSES = fixed(
    Column("schedule", text("schedule")),
    Column("ms / iteration", number("iteration_ms", ".0f")),
    Column("time / stock", number("over_stock", ".3f")),
    Column("F ms", number("forward_ms", ".1f")),
    Column("B + W ms", number("backward_ms", ".1f")),
)
_WGRAD = fixed(
    Column("dtype", text("dtype")),
    Column("weights", text("weights")),
    Column("how", text("variant")),
    Column("us", number("us", ".0f")),
    Column("GFLOPS", number("gflops", ".0f")),
    Column("time / first", number("over_reference", ".3f")),
)
SECTIONS = {
    "emulated": Section(
        "Passes that only take time",
        _emulated,
        _emulated_words,
        fixed(
            Column("schedule", text("schedule")),
            Column("planned ms", number("planned_ms", ".0f")),
            Column("measured ms", number("measured_ms", ".0f")),
            Column("measured / planned", number("over_planned", ".3f")),
        ),
        excerpt=("schedule", "planned ms", "measured ms", "measured / planned"),
    ),
    "virtual": Section(
        "What it executes, against the plan",
        _virtual,
        _virtual_words,
        fixed(
            Column("ranks", text("num_ranks")),
            Column("cases", text("cases")),
            Column("largest difference, ms", number("worst_ms", ".6f")),
        ),
    ),
    "tracing": Section(
        "Recorded iterations",
        _tracing,
        _tracing_words,
        fixed(
            Column("schedule", text("schedule")),
            Column("bubble by the wall clock, %", number("wall", ".2f")),
            Column("by the trace, %", number("trace", ".2f")),
            Column("apart at most, points", number("apart", ".2f")),
            Column("recording, %", number("overhead", "+.2f")),
        ),
    ),
    "real-compute": Section(
        "Real compute",
        _real,
        _real_words,
        _REAL,
        ("microbatches", "schedule", "time / stock 1F1B", "predicted", "bound"),
    ),
    "passes": Section("Pass times", _real, _passes_words, _PASSES),
    "passes-cuda": Section("Pass times on a GPU", _real, _passes_words, _PASSES),
    "real-compute-cuda": Section("Real compute on GPUs", _real, _real_words, _REAL),
    "wgrad": Section("Weight gradients", _wgrad, _wgrad_words, _WGRAD, ("dtype", "weights", "how", "time / first")),
    "wgrad-cuda": Section("Weight gradients on a GPU", _wgrad, _wgrad_words, _WGRAD),
    "post-validation": Section(
        "With the optimizer",
        _period,
        _period_words,
        fixed(
            Column("optimizer", text("optimizer")),
            Column("predicted ms", number("predicted_ms", ".0f")),
            Column("measured ms", number("measured_ms", ".0f")),
            Column("measured / predicted", number("over_predicted", ".3f")),
        ),
        excerpt=("optimizer", "predicted ms", "measured ms", "measured / predicted"),
    ),
    "rollback": Section(
        "Taking a step back",
        _rollback,
        _rollback_words,
        fixed(
            Column("rollback", text("rollback")),
            Column("step ms", number("step_ms", ".1f")),
            Column("check ms", number("check_ms", ".1f")),
            Column("keep ms", number("keep_ms", ".1f")),
            Column("undo ms", number("undo_ms", ".1f")),
            Column("bytes an element", number("bytes_per_element", ".1f")),
        ),
    ),
    "peers": Section(
        "zb-auto against public schedules",
        _peers,
        _peers_words,
        fixed(
            Column("objective", text("objective")),
            Column("memory", text("memory")),
            Column("questions", text("questions")),
            Column("zb-auto", _rate("ours")),
            Column("best public", _rate("best_peer")),
            Column("bound", lambda row: _percent(row["bound"])),
            Column("seconds to plan", number("seconds", ".1f")),
        ),
    ),
    "scaling": Section("Scaling on paper", _scaling, _scaling_words, _scaling_columns),
}
"""By the name of the bench, in the order of the page."""
