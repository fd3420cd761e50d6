"""Run the pair matrix: ``bash scripts/pair_matrix.sh --help``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue

from pair_matrix.matrix import DEFAULT_JOBS, Matrix, refused_rows, rule_of
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
        "--jobs", type=int, metavar="N", help=f"run at most N jobs; default: {DEFAULT_JOBS}, with --full all of them"
    )
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N jobs of the array")
    parser.add_argument("--seed", type=int, default=0, help="seed of the array; default: 0")
    parser.add_argument(
        "--only", action="append", metavar="ROW", help="run this job only: words option=value, as the report shows them"
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="jobs at a time; default: 1")
    parser.add_argument("--output", metavar="FILE", help="append one JSON object per job to this file")
    parser.add_argument("--list", action="store_true", help="print the jobs and run none")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the jobs; return 0 if all are equal to stock as promised, 1 if not, 2 for a bad command line."""
    options = parse(argv)
    install_cpu_platform()
    try:
        only = [row_of(text) for text in options.only or ()]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    matrix = Matrix(options.seed)
    most = options.jobs or (None if options.full else DEFAULT_JOBS)
    last = None if most is None else options.skip + most
    drawn = chain(islice(matrix.rows(), options.skip, last), refused_rows() if options.full else ())
    rows: Iterable[Row] = only or drawn
    if options.list:
        for row in rows:
            print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        return 0
    verdicts = list(_run(rows, options.parallel, options.output))
    return _summary(verdicts, None if only else matrix)


def _run(rows: Iterable[Row], parallel: int, output: str | None) -> Iterator[Verdict]:
    """Run rows on ``parallel`` pools of ranks while further rows are drawn; report each of them."""
    idle: SimpleQueue[RankPool] = SimpleQueue()
    for _ in range(parallel):
        idle.put(RankPool())

    def on_a_pool(row: Row) -> Verdict:
        pool = idle.get()
        try:
            verdict = run(row, pool)
        finally:
            idle.put(pool)
        _report(verdict, output)
        return verdict

    with ThreadPoolExecutor(parallel) as executor:
        yield from executor.map(on_a_pool, rows)
    for _ in range(parallel):
        idle.get().close()


def _report(verdict: Verdict, output: str | None) -> None:
    text = f"{verdict.status} {verdict.promise}".strip()
    lines = [f"{text}, {verdict.seconds:.1f} s: {verdict.row}"]
    if not verdict.passed:
        details = [line for text in verdict.details for line in text.splitlines()]
        lines += [f"    {line[:400]}" for line in details[-_SHOWN:]]
    print("\n".join(lines), flush=True)
    if output is not None:
        with Path(output).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")


def _summary(verdicts: Sequence[Verdict], matrix: Matrix | None) -> int:
    refused = {} if matrix is None else matrix.refused()
    for reason, pairs in refused.items():
        print(f"refused, {len(pairs)} pairs: {reason}")
        print(f"    {'; '.join(pairs[:6])}{'; ...' if len(pairs) > 6 else ''}")
    if matrix is not None:
        print(f"{matrix.covered} of {matrix.pairs} pairs of values covered, {sum(map(len, refused.values()))} refused")
    counts = Counter(f"{one.status} {one.promise}".strip() for one in verdicts)
    print(f"{len(verdicts)} jobs: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    bad = [one for one in verdicts if not one.passed]
    for one in bad:
        print(f'{one.status}: --only "{one.row}"')
    surprises = [reason for reason in refused if rule_of(reason) is None]
    for reason in surprises:
        print(f"pairs are refused by a rule that the matrix does not know: {reason}")
    return 1 if bad or surprises else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
