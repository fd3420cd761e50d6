"""Try an installed ``zero-bubble`` command, whose path is the argument, without torch, megatron-core or a checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from urllib.request import urlopen

COSTS = "--num-ranks 4 --num-microbatches 8 --forward-ms 10 --backward-ms 11 --wgrad-ms 7".split()


def run(*arguments: str) -> str:
    """The output of one command, which must succeed."""
    return subprocess.run([COMMAND, *arguments], check=True, capture_output=True, text=True).stdout


def playground() -> None:
    """Its page, and a plan that the page asks for."""
    command = [COMMAND, "playground", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
            with urlopen(address, timeout=30) as page:
                assert b"<html" in page.read()
        finally:
            server.terminate()


COMMAND = sys.argv[1]
assert find_spec("torch") is None, "this environment has torch, so it shows nothing"
assert "zb-v" in run("list")
for schedule in ("zb-h1", "zb-v", "zb-auto"):
    memory = ["--memory-limit", "1p"] if schedule == "zb-auto" else []
    assert json.loads(run("plan", "--schedule", schedule, *COSTS, *memory, "--format", "json"))
assert "zb-h2" in run("compare", *COSTS)
playground()
report = json.loads(run("report", "--format", "json"))
assert report["torch"] == "not installed"
refused = subprocess.run(
    [sys.executable, "-c", "from megatron.zero_bubble import apply"], capture_output=True, text=True, check=False
)
assert "[train]" in refused.stderr, refused.stderr
print(f"list, plan, compare, playground and report work; planner: {report['planner']}")
