"""Store results in docs/gpu_day.json, and bring docs/gpu.md and the README up to date.

    bash scripts/gpu_day.sh page runs/gpu_day/gpu_day.json [FILE ...]

Where several files have the same step, the last one counts; steps that no file has stay as they are stored.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import ranks
from gpu_day.run import join
from gpu_day.steps import PARTS

STORED = Path("docs/gpu_day.json")
_OF_THE_MACHINE = ("command", "last_lines")
"""What a step's record has paths of the machine in. The page names the modules and arguments of all steps."""


def main() -> int:
    """Merge the files, then generate the documentation."""
    parser = argparse.ArgumentParser(prog="gpu_day.sh page", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    stored = ranks.ROOT / STORED
    try:
        parts = merged([*([stored] if stored.exists() else []), *parser.parse_args().files])
    except (OSError, ValueError) as error:
        parser.error(str(error))
    ranks.write(stored, parts)
    return subprocess.run([sys.executable, "scripts/generate_docs.py"], cwd=ranks.ROOT, check=False).returncode


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """The parts of all files.

    Raises:
        ValueError: a file is not JSON, or has a part that ran without a GPU.
    """
    parts: dict[str, Any] = {}
    for file in files:
        parts = join(parts, json.loads(file.read_text(encoding="utf-8")))
        if without := [name for name, part in parts.items() if part["on_cpu"] or not part["machine"]["gpus"]]:
            raise ValueError(
                f"the page shows only runs on GPUs, got part {without[0]} of {file} without; run it where nvidia-smi "
                "finds a GPU, without --cpu"
            )
    return {n: {**parts[n], "steps": [*map(_published, parts[n]["steps"])]} for n in PARTS if n in parts}


def _published(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name not in _OF_THE_MACHINE}


if __name__ == "__main__":
    sys.exit(main())
