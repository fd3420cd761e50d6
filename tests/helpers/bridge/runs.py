"""Run Megatron-Bridge's ``pretrain()`` on CPU ranks, several times in the same processes to import once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.hybrid_models import STAND_INS
from tests.helpers.megatron_lm import Checkout, Log, checkouts, environment
from tests.helpers.processes import wait_for

VARIABLE = "ZB_BRIDGE"
NUM_RANKS = 2


@dataclass(frozen=True)
class BridgeRun:
    """One run.

    Attributes:
        variables: of the configuration's ``env_vars``.
        settings: fields of the configuration that differ from the toy's, by their dotted names.
        from_builder: whether the model is a ``ModelConfig`` instead of a provider.
        has_adapters: whether ``finetune()`` trains LoRA's adapters, instead of ``pretrain()`` all weights.
        provider: of the model: the recipe's of a GPT, that of ``latent`` attention, or that of ``hybrid`` layers.
    """

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    from_builder: bool = False
    has_adapters: bool = False
    provider: str = ""


def bridge() -> Path | None:
    """The checkout of Megatron-Bridge, if there is one."""
    folder = os.environ.get(VARIABLE)
    return Path(folder).resolve() if folder else None


def core() -> Checkout | None:
    """The checkout whose megatron-core Megatron-Bridge needs: of 0.20 or newer, if there is one."""
    newest = checkouts()[-1:]
    return next((each for each in newest if int(each.minor.partition(".")[2]) >= 20), None)


def run_bridge(runs: Sequence[BridgeRun], folder: Path, timeout: float = 700) -> dict[str, Log]:
    """Run all ``runs``, one after the other on the same ranks; return their output and the exit codes of the ranks.

    Args:
        folder: for the output, the rendezvous of the ranks and the cache of the data.
    """
    checkout, megatron = bridge(), core()
    assert checkout is not None and megatron is not None
    cache = {"dataset.path_to_cache": str(folder / "cache")}
    described = [asdict(run) | {"settings": {**cache, **run.settings}} for run in runs]
    (folder / "runs.json").write_text(json.dumps(described))
    path = [*environment()["PYTHONPATH"].split(os.pathsep), str(megatron.path), str(checkout / "src"), str(STAND_INS)]
    common = environment() | {
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "ZERO_BUBBLE_DEVICE": "cpu",
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
    }
    command = [sys.executable, "-m", "tests.helpers.bridge.rank", str(checkout), str(folder / "runs.json")]
    outputs = [folder / f"rank-{rank}" for rank in range(NUM_RANKS)]
    ranks = []
    for rank, output in enumerate(outputs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with output.open("wb") as file:
            ranks.append(subprocess.Popen(command, env=common | own, stdout=file, stderr=subprocess.STDOUT, cwd=folder))
    wait_for(ranks, timeout)
    for each in ranks:
        each.kill()  # those that wait for one that failed
    codes = [each.wait() for each in ranks]
    return _by_run([output.read_text(errors="replace") for output in outputs], codes)


def _by_run(outputs: Sequence[str], codes: Sequence[int]) -> dict[str, Log]:
    """The output of every run, of all ranks in order."""
    text: dict[str, str] = {}
    for output in outputs:
        for part in f"\n{output}".split("\nrun ")[1:]:
            name, _, rest = part.partition("\n")
            text[name] = text.get(name, "") + rest
    assert text, outputs
    return {name: Log(part, codes) for name, part in text.items()}
