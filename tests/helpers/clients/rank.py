"""One rank of several runs of a client: ``rank.py MODULE CHECKOUT FOLDER``, started by ``runs.py``."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import megatron.zero_bubble


def main() -> None:
    module, checkout, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    megatron.zero_bubble.use_cpu_ranks()
    client = importlib.import_module(f"tests.helpers.clients.{module}")
    client.load(checkout, folder)
    gc.freeze()  # frameworks search for garbage often
    for run in json.loads((folder / "runs.json").read_text()):
        child = os.fork()
        if child == 0:
            _run(client, run, folder)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            print((folder / f"{run['name']}-{os.environ['RANK']}.log").read_text(errors="replace"))
            sys.exit(f"{run['name']} ended with {code}")


def _run(client: Any, run: dict[str, Any], folder: Path) -> None:
    """Train in this process, write the outcome, and end it without what was registered before the fork."""
    name = f"{run['name']}-{os.environ['RANK']}"
    code = 1
    faulthandler.enable()
    try:
        with (folder / f"{name}.log").open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(run["variables"])
        seen, weights = client.train(run, folder)
        (folder / f"{name}.json").write_text(json.dumps({"seen": seen, "weights": weights}))
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
