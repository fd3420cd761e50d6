"""Try an installed ``zero-bubble`` command, whose path is the argument, without torch, megatron-core or a checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from urllib.request import urlopen

COSTS = "--num-ranks 4 --num-microbatches 8 --forward-ms 10 --backward-ms 11 --wgrad-ms 7".split()

JOB = (
    "--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 4 --bf16 --vocab-size 32000 "
    "--tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --mock-data"
).split()


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
assert "ranks idle" in run("advise", "--nodes", "1", "--gpu", "h100", "--quick", "--", *JOB)
playground()
report = json.loads(run("report", "--format", "json"))
assert report["torch"] == "not installed"
refused = subprocess.run(
    [sys.executable, "-c", "from megatron.zero_bubble import apply"], capture_output=True, text=True, check=False
)
assert "[train]" in refused.stderr, refused.stderr
print(f"list, plan, compare, advise, playground and report work; planner: {report['planner']}")
