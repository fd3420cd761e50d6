"""The tables of docs/catalogue.md, from docs/catalogue.csv, which ``zero-bubble catalogue`` has written."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from site_parts.markdown import code, table

_CSV = Path(__file__).parent.parent.parent / "docs/catalogue.csv"
_PROXIES = _CSV.with_name("proxies.csv")
_FUNCTIONAL, _PERFORMANCE = "/functional_tests/", "/perf_recipes/"
_LEAST = 0.05
Row = dict[str, str]


def _rows() -> list[Row]:
    with _CSV.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _kind(row: Row) -> str:
    folder, _, path = row["name"].partition("/")
    if _FUNCTIONAL in path:
        return f"{folder}, functional tests"
    return f"{folder}, performance" if _PERFORMANCE in path else folder


def counts() -> str:
    """One row per folder: its recipes by outcome."""
    rows = _rows()
    outcomes = list(dict.fromkeys(["gains", "stays", "refused", "broken", *(row["outcome"] for row in rows)]))
    kinds = dict.fromkeys(map(_kind, rows))
    numbers = Counter((_kind(row), row["outcome"]) for row in rows)
    idle = Counter((_kind(row), least) for row in rows for least in (5, 10) if float(row["idle"] or 0) >= least / 100)
    longest = {kind: max(float(row["seconds"]) for row in rows if _kind(row) == kind) for kind in kinds}
    head = ("recipes of", "number", *outcomes, "idle 5 % or more", "10 % or more", "longest answer, CPU s")
    lines = [
        (
            kind,
            str(sum(_kind(row) == kind for row in rows)),
            *(str(numbers[kind, each] or "") for each in outcomes),
            *(str(idle[kind, least]) for least in (5, 10)),
            f"{longest[kind]:.0f}",
        )
        for kind in kinds
    ]
    return table(head, lines)


def idle() -> str:
    """The recipes with a pipeline that idle most, without tests."""
    found = [row for row in _rows() if float(row["idle"] or 0) >= _LEAST and _FUNCTIONAL not in row["name"]]
    found.sort(key=lambda row: -float(row["idle"]))
    head = ("recipe", "GPUs", "ranks x stages", "microbatches", "idle", "best change", "gain", "under our schedules")
    names = Counter(map(_short, found))
    return table(head, (_cells(row, _short(row) if names[_short(row)] == 1 else _long(row)) for row in found))


def _short(row: Row) -> str:
    """The name of a recipe: that of its function, or the path of its file."""
    return row["name"].rpartition(":")[2].removesuffix("_config").removeprefix("Megatron-LM/")


def _long(row: Row) -> str:
    """The same with the name of its file, for recipes of the same name."""
    return f"{Path(row['name'].rpartition(':')[0]).stem}: {_short(row)}"


def _cells(row: Row, name: str) -> tuple[str, ...]:
    gain = f"{float(row['gain']):.1%}" if row["gain"] else "none"
    state = "starts" if row["outcome"] in ("gains", "stays") else f"refused: {row['option'] or row['reason'][:60]}"
    shape = f"{row['ranks']} x {row['stages']}"
    gpus = f"{row['gpus']} {row['gpu']}{' (assumed)' if row['is_assumed'] == 'True' else ''}"
    return (
        code(name),
        gpus,
        shape,
        row["microbatches"],
        f"{float(row['idle']):.1%}",
        row["change"] or "stay",
        gain,
        state,
    )


def proxies() -> str:
    """The large-scale proxies of Megatron-Bridge with the advice of searches, from a table of their own."""
    with _PROXIES.open(encoding="utf-8") as stream:
        rows = sorted(csv.DictReader(stream), key=lambda row: -float(row["idle"]))
    now, then = ("idle", "all-to-alls"), ("idle then", "all-to-alls then")
    head = ("recipe", "ranks x stages", "microbatches", *now, "best change", "time", *then, "flags")
    return table(head, map(_proxy, rows))


def _proxy(row: Row) -> tuple[str, ...]:
    name, change = code(_short(row).removesuffix("_large_scale")), row["change"] or "stay"
    flags = code(row["flags"]) if row["flags"] else ""
    shape, time = f"{row['ranks']} x {row['stages']}", f"{-float(row['gain']):.1%}" if row["gain"] else ""
    now, then = ([_share(row[key + of]) for key in ("idle", "exposed")] for of in ("", "_then"))
    return name, shape, row["microbatches"], *now, change, time, *then, flags


def _share(text: str) -> str:
    return f"{float(text):.1%}" if text else ""


def refused() -> str:
    """The refused and the broken recipes, by option and reason."""
    return table(("outcome", "option", "reason, of the first", "recipes"), _reasons())


def _reasons() -> Iterator[tuple[str, ...]]:
    for outcome in ("refused", "broken"):
        own = [row for row in _rows() if row["outcome"] == outcome]
        for option, number in Counter(row["option"] for row in own).most_common():
            first = next(row for row in own if row["option"] == option)
            yield outcome, code(option) if option else "", first["reason"].replace("|", "\\|"), str(number)


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def words() -> str:
    """One sentence for the README: what performance recipes idle, and what the best change gains where it gains."""
    known = [row for row in _rows() if _PERFORMANCE in row["name"] and row["idle"]]
    idle = [sum(float(row["idle"]) >= least for row in known) for least in (0.1, 0.05)]
    gains = [float(row["gain"]) for row in known if row["gain"]]
    of = f"of the {len(known)} performance recipes of Megatron-Bridge with a pipeline, {idle[0]} idle 10 % or more"
    gain = f"the best saves {_percent(median(gains))} in the median, {_percent(max(gains))} at most"
    where = "**Published recipes** ([estimates](docs/catalogue.md))"
    return f"{where}: {of}, {idle[1]} at least 5 %; where a change gains, {gain}."


PARTS: dict[str, Callable[[], str]] = {
    "recipe-words": words,
    "recipe-counts": counts,
    "recipe-idle": idle,
    "recipe-proxies": proxies,
    "recipe-reasons": refused,
}
