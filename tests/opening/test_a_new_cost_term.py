"""A new term of costs is a row, a field where it is used, a field per layer and a flag: four edits in four files.

The edits are made in a copy of the package, in which files, placements, layers, flags and the documentation know it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = Path("megatron/zero_bubble")

EDITS = {
    "core/costs/terms.py": {
        '    Term("comm_ms",': '    Term("launch_ms", "stage", "ms", "passes", "time to launch F", of_layer=True),\n'
    },
    "core/costs/passes.py": {
        "    # Copies to the host,": "    launch_ms: tuple[float, ...] = ()\n",
        "        tokens = part = slices": "        whole += self.launch_ms[p.stage] if p.kind is F else 0.0\n",
    },
    "core/costs/layers.py": {"    host_ms: float = 0.0": "    launch_ms: float = 0.0\n"},
    "cli/figures.py": {
        '    "comm_ms": _Flag(': '    "launch_ms": _Flag("--launch-ms", "L", "time to launch F {times}"),\n'
    },
}
"""What is inserted, by file and by the line that it is put before."""

CHECKS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import megatron.zero_bubble
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.costs.layers import of_stages
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile, costs_to_json
from megatron.zero_bubble.core.ir import Kind, Pass, Placement
from site_parts import cost_keys

assert megatron.zero_bubble.__file__.startswith(sys.argv[2]), "the copy"
times = {"forward_ms": [2, 4], "backward_ms": [3, 3], "wgrad_ms": [1, 1]}
file = CostsFile.parse(json.dumps({**times, "launch_ms": [0.5, 1.5]}))
linear, vee = Placement.linear(2), Placement.vee(2)
costs, _ = file.on(linear)
assert costs.launch_ms == (0.5, 1.5) and costs.duration(Pass(1, Kind.F, 0)) == 5.5
assert file.on(vee)[0].launch_ms == costs.fit(vee).launch_ms == (0.25, 0.25, 0.75, 0.75)
assert costs.fit(Placement.linear(1)).launch_ms == (2.0,)
assert CostsFile.parse(json.dumps({**times, "launch_ms": 1})).on(vee)[0].launch_ms == (0.5,) * 4
assert CostsFile.parse(costs_to_json(costs)).on(linear)[0] == costs
assert "launch_ms" not in costs_to_json(CostsFile.parse(json.dumps(times)).on(linear)[0])

layer = {"forward_ms": 2, "backward_ms": 3, "wgrad_ms": 1, "launch_ms": 0.25}
per_layer = CostsFile.parse(json.dumps({"layers": ["a*4"], "parts": {"a": layer, "loss": {"launch_ms": 1}}}))
assert per_layer.on(linear)[0].launch_ms == (0.5, 1.5)
assert of_stages(costs, None, (1, 1)).on((1, 1))[0].launch_ms == (0.5, 1.5)

for wrong, message in ((-1, "launch_ms must be a finite number, 0 or above; got -1"), ([1], "got 1; give as many")):
    try:
        CostsFile.parse(json.dumps({**times, "launch_ms": wrong})).on(linear)
        raise SystemExit(f"{wrong} was accepted")
    except UserError as error:
        assert message in str(error), error
try:
    CostsFile.parse(json.dumps({**times, "lanch_ms": 1}))
except UserError as error:
    assert "did you mean launch_ms?" in str(error), error

flags = "--schedule 1f1b --num-ranks 1 --num-microbatches 1 --forward-ms 4 --backward-ms 5 --wgrad-ms 3 --launch-ms 2"
assert main(["plan", *flags.split(), "--format", "json"]) == 0
assert "| `launch_ms` | stage | ms | 0 | added | yes | time to launch F |" in cost_keys.terms()
"""


def test_a_new_term_is_four_edits(tmp_path: Path) -> None:
    package = tmp_path / PACKAGE
    shutil.copytree(ROOT / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name, insertions in EDITS.items():
        text = (package / name).read_text()
        for place, line in insertions.items():
            assert text.count(place) == 1, f"{name} must have one place for the edit: {place!r}"
            text = text.replace(place, line + place)
        (package / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", CHECKS, str(ROOT / "scripts"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"makespan_ms": 14.0' in done.stdout, "the flag counts: 4 + 2 + 5 + 3 ms"
