"""Run the pair matrix: ``bash scripts/pair_matrix.sh --help``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pair_matrix.matrix import DEFAULT_JOBS, array_of, rule_of
from pair_matrix.options import OPTIONS, Row, row_of
from pair_matrix.run import Verdict, run
from tests.helpers.ranks import RankPool, install_cpu_platform

_SHOWN = 12
"""Lines of a failure that are printed; the report has all."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="pair_matrix.sh",
        description=f"Train jobs on 2 to 4 CPU ranks that combine {len(OPTIONS)} options of a run, with stock "
        "megatron-core and with zero-bubble schedules, and compare the results as docs/exactness.md promises.",
    )
    parser.add_argument("--full", action="store_true", help="run until every pair of values is covered or refused")
    parser.add_argument(
        "--jobs", type=int, default=DEFAULT_JOBS, metavar="N", help=f"jobs without --full; default: {DEFAULT_JOBS}"
    )
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N jobs of the array")
    parser.add_argument("--seed", type=int, default=0, help="seed of the array; default: 0")
    parser.add_argument(
        "--only", action="append", metavar="ROW", help="run this job only: words option=value, as the report shows them"
    )
    parser.add_argument("--output", metavar="FILE", help="write all results to this JSON file, job by job")
    parser.add_argument("--list", action="store_true", help="print the jobs and run none")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the jobs; return 0 if all are equal to stock as promised, else 1."""
    options = parse(argv)
    install_cpu_platform()
    try:
        rows: list[Row] = [row_of(text) for text in options.only or ()]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    refused: dict[str, list[str]] = {}
    if not rows:
        found = array_of(options.seed, None if options.full else options.jobs)
        rows, refused = list(found.rows[options.skip :]), found.refused
        print(f"{len(found.rows)} jobs cover {found.covered} of {found.pairs} pairs of values", flush=True)
    if options.list:
        print("\n".join(f"{' '.join(f'{name}={value}' for name, value in row.items())}" for row in rows))
        return 0
    verdicts = _run(rows, options.output, refused)
    return _summary(verdicts, refused)


def _run(rows: Sequence[Row], output: str | None, refused: dict[str, list[str]]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    pool = RankPool()
    for number, row in enumerate(rows, 1):
        verdict = run(row, pool)
        verdicts.append(verdict)
        print(
            f"{number}/{len(rows)} {verdict.status} {verdict.promise} {verdict.seconds:.1f} s: {verdict.row}",
            flush=True,
        )
        if verdict.status != "equal":
            lines = [line for text in verdict.details for line in text.splitlines()]
            print("\n".join(f"    {line[:400]}" for line in lines[-_SHOWN:]), flush=True)
        if output is not None:
            report = {"jobs": [asdict(one) for one in verdicts], "refused pairs": refused}
            Path(output).write_text(json.dumps(report, indent=1), encoding="utf-8")
    pool.close()
    return verdicts


def _summary(verdicts: Sequence[Verdict], refused: dict[str, list[str]]) -> int:
    bad = [one for one in verdicts if one.status != "equal"]
    surprises = [reason for reason in refused if rule_of(reason) is None]
    for reason, pairs in refused.items():
        print(f"refused, {len(pairs)} pairs: {reason}")
        print(f"    {'; '.join(pairs[:6])}{'; ...' if len(pairs) > 6 else ''}")
    counts = Counter(f"{one.status} {one.promise}".strip() for one in verdicts)
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    for one in bad:
        print(f"{one.status}: {one.row}")
    for reason in surprises:
        print(f"pairs refused by a rule that the matrix does not know: {reason}")
    return 1 if bad or surprises else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
