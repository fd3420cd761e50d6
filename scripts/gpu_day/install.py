"""Make megatron-core and the compiled ops usable: from what ``gpu_day.sh pack`` collected, else from the sources.

Packages go into ``build/gpu_day/site``, which ``gpu_day.sh`` puts on Python's path, so the interpreter stays as it is.
With ``--device cpu`` nothing is built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import invalidate_caches
from importlib.util import find_spec

from bench.ranks import ROOT
from gpu_day import shared_nccl, step

PACKED = ROOT / "build/gpu_day/packed"
SITE = ROOT / "build/gpu_day/site"
ARCHIVE = "site.tar.xz"
EXTENSIONS = {"_ops": "megatron/zero_bubble", "_planner": "megatron/zero_bubble/core/search"}
"""The folders of the compiled extensions."""
_LOAD = """
import sys
from importlib.metadata import version
from megatron.zero_bubble.engine.kernels import select
print(select(sys.argv[1]).words, version("megatron-core"), sep="\\n")
"""


def main() -> int:
    """Build the ops if necessary, and load; return 1 if the ops for the GPU are not compiled."""
    options = step.parser(__doc__).parse_args()
    if find_spec("megatron.core") is None:
        raise SystemExit(
            f"no megatron-core and nothing in {PACKED}; run `bash scripts/gpu_day.sh pack` where there is a network"
        )
    if options.device == "cuda" and loaded(options.device)[0] != "compiled":
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=ROOT, env={**os.environ, "ZB_BUILD": "cuda"}, check=True)
    ops, megatron_core = loaded(options.device)
    step.write(options.output, {"ops": ops, "megatron_core": megatron_core})
    return int(options.device == "cuda" and ops != "compiled")


def unpack() -> None:
    """Unpack, once, what ``pack`` has collected, if it has."""
    if SITE.exists() or not (PACKED / ARCHIVE).exists():
        return
    if (PACKED / shared_nccl.PACKED).exists():
        shared_nccl.unpack(PACKED / shared_nccl.PACKED)
    copied = copy_extensions()
    print(f"unpacked {PACKED}; extensions: {', '.join(copied) or 'none is for this Python'}", flush=True)
    shutil.unpack_archive(PACKED / ARCHIVE, SITE, filter="data")
    invalidate_caches()  # Python has noted that the folder on its path does not exist


def copy_extensions() -> list[str]:
    """Copy packed extensions for this Python into the checkout; return their names."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    fitting = sorted(PACKED.glob(f"extensions/*{suffix}"))
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
