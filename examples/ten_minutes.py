#!/usr/bin/env python3
# %% [markdown]
# # Ten minutes on a laptop
#
# Train a small GPT on two CPU ranks under Megatron's 1F1B, look at where the ranks wait, write a schedule of your own,
# and train under it with the same losses. Start it with `python examples/ten_minutes.py`, or cell by cell in an editor
# that reads `# %%` as cells (VS Code, PyCharm, Jupyter with jupytext). Needs `bash scripts/setup_env.sh` once.

# %%
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from megatron.zero_bubble import PassCosts, Placement, Schedule, build, simulate
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.render.text import render_text

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "runs/ten_minutes"
RANKS, MICROBATCHES, ITERATIONS = 2, 8, 12


def train(name: str, *flags: str) -> list[dict]:
    """Train configs/gpt_tiny.yaml on data that is made up; return the metrics of every iteration."""
    folder = FILES / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(ROOT / "scripts/pretrain_gpt.py"), "--config", str(ROOT / "configs/gpt_tiny.yaml"), "--mock-data"]
    command += ["--train-iters", str(ITERATIONS), "--eval-iters", "0", "--zero-bubble-device", "cpu"]
    command += ["--metrics-file", str(folder / "metrics.jsonl"), "--zero-bubble-trace", str(folder), *flags]
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


# %% [markdown]
# ## 1. Megatron's own schedule
#
# In 1F1B, rank 0 waits for the gradients of rank 1 before each of its backwards. The trace has the plan and the
# measurement: open `runs/ten_minutes/1f1b/timeline.svg`.

# %%
stock = train("1f1b")

# %% [markdown]
# ## 2. Where the time goes
#
# A backward is two passes: B, the gradient of the input, which the other rank waits for, and W, the gradient of the
# weights, on which no other pass depends. This run measures them. A cell of the drawing is a pass: its letter, and the
# number of its microbatch.

# %%
costs_file = FILES / "costs.json"
exact = ("--zero-bubble-exact", "--zero-bubble-record-costs", str(costs_file))
zb_h1 = train("zb-h1", "--zero-bubble-schedule", "zb-h1", *exact)
measured = json.loads(costs_file.read_text())
forward_ms, backward_ms, wgrad_ms = (tuple(measured[key]) for key in ("forward_ms", "backward_ms", "wgrad_ms"))
costs = PassCosts(forward_ms, backward_ms, wgrad_ms)
for name in ("1f1b", "zb-h1"):
    schedule = build(name, num_ranks=RANKS, num_microbatches=MICROBATCHES)
    print(render_text(simulate(schedule, costs), max_width=100))

# %% [markdown]
# ## 3. A schedule of your own
#
# An order of passes per rank is all that a schedule is. This one keeps every W for the end. It is legal, and it needs
# the memory of all microbatches; move the Ws forward and see what changes. An order that cannot run is refused with
# the pass and the reason.


# %%
def passes(ahead: int) -> list[str]:
    """F and B in turn, with so many forwards ahead; then every W."""
    turns = [text for m in range(MICROBATCHES + ahead) for text in (f"F{m}", f"B{m - ahead}")]
    return [t for t in turns if 0 <= int(t[1:]) < MICROBATCHES] + [f"W{m}" for m in range(MICROBATCHES)]


rows = [[f"{rank}{text}" for text in passes(ahead=RANKS - 1 - rank)] for rank in range(RANKS)]
own = Schedule.from_text("w-at-the-end", Placement.linear(RANKS), MICROBATCHES, rows)
timeline = simulate(own, costs)
print(render_text(timeline, max_width=100))

# %% [markdown]
# ## 4. Train under it
#
# A plan file is a schedule that a job reads. The run proves it free of deadlock before it trains.

# %%
plan_file = FILES / "own.json"
plan_file.write_text(plan_to_json(timeline))
ours = train("own", "--zero-bubble-schedule", str(plan_file), "--zero-bubble-exact")

# %% [markdown]
# ## 5. Compare
#
# Losses and gradient norms are those of stock, to the last bit. Two ranks on a laptop gain little; `zero-bubble
# compare` and `zero-bubble playground` show what more ranks gain.


# %%
def bits(run: list[dict]) -> list[tuple[float, float]]:
    """What must be equal, of every iteration."""
    return [(step["lm_loss"], step["grad_norm"]) for step in run]


print(f"\n{'schedule':14}{'tokens/s':>10}{'last loss':>12}  same bits as 1F1B")
for name, run in (("1f1b", stock), ("zb-h1", zb_h1), ("w-at-the-end", ours)):
    speed = median(step["tokens_per_second"] for step in run[3:])
    same = bits(run) == bits(stock)
    print(f"{name:14}{speed:>10,.0f}{run[-1]['lm_loss']:>12.6f}  {'yes' if same else 'NO'}")
