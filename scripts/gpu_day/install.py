"""Make megatron-core and the compiled ops usable: from what ``gpu_day.sh pack`` collected, else from the sources.

Packages go into ``build/gpu_day/site``, which ``gpu_day.sh`` puts on Python's path, so the interpreter stays as it is.
With ``--device cpu`` nothing is installed or built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from bench.ranks import ROOT
from gpu_day import shared_nccl, step

PACKED = ROOT / "build/gpu_day"
SITE = PACKED / "site"
EXTENSIONS = {"_ops": "megatron/zero_bubble", "_planner": "megatron/zero_bubble/search"}
"""The folders of the compiled extensions."""
_LOAD = """
import sys
from importlib.metadata import version
from megatron.zero_bubble.kernels import select
print(select(sys.argv[1]).words, version("megatron-core"), sep="\\n")
"""


def main() -> int:
    """Install, build if necessary, and load; return 1 if the ops for the GPU are not compiled."""
    options = step.parser(__doc__).parse_args()
    if options.device == "cuda":
        for packed in PACKED.glob(f"piece-*/{shared_nccl.PACKED}"):
            shared_nccl.unpack(packed)
        if find_spec("megatron.core") is None:
            install(sorted(PACKED.glob("piece-*/wheels/*.whl")))
        copied = copy_extensions(sorted(PACKED.glob("piece-*/extensions/*.so")))
        print(f"copied: {', '.join(copied) or 'nothing, no packed extension is for this Python'}")
        if loaded(options.device)[0] != "compiled":
            subprocess.run(
                [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
                cwd=ROOT,
                env={**os.environ, "ZB_BUILD": "cuda"},
                check=True,
            )
    ops, megatron_core = loaded(options.device)
    step.write(options.output, {"ops": ops, "megatron_core": megatron_core})
    return int(options.device == "cuda" and ops != "compiled")


def install(wheels: list[Path], *more: str) -> None:
    """Install packages into ``SITE`` without a network."""
    if not wheels:
        raise SystemExit(
            f"no packages in {PACKED}/piece-*; run `bash scripts/gpu_day.sh pack` where there is a network"
        )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(SITE), *more, *map(str, wheels)], check=True)


def copy_extensions(built: list[Path]) -> list[str]:
    """Copy extensions for this Python into the checkout; return their names."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    fitting = [path for path in built if path.name.endswith(suffix)]
    for path in fitting:
        shutil.copy2(path, ROOT / EXTENSIONS[path.name.removesuffix(suffix)])
    return [path.name for path in fitting]


def loaded(device: str) -> tuple[str, str]:
    """In a new process that binds all symbols at once: which ops are selected, and megatron-core's version."""
    result = subprocess.run(
        [sys.executable, "-c", _LOAD, device],
        env={**os.environ, "LD_BIND_NOW": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    print(result.stderr, file=sys.stderr)
    ops, megatron_core = result.stdout.splitlines()[-2:]
    return ops, megatron_core


if __name__ == "__main__":
    sys.exit(main())
