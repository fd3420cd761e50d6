"""NCCL for ranks that share GPUs, carried to a machine whose own NCCL is older than 2.30."""

from __future__ import annotations

import lzma
import subprocess
import zipfile
from pathlib import Path

from bench.ranks import ROOT
from gpu_day.slim import slim

VERSION = "2.31.2"
"""2.30.7 is said to hang where a rank sends and receives in one group."""
LIBRARY = ROOT / "build/gpu_day/nccl/libnccl.so.2"
PACKED = "libnccl.so.2.xz"


def variables() -> dict[str, str]:
    """The environment of ranks that share GPUs over NCCL; empty if no library was packed.

    Every communicator of every rank takes CTAs of the same GPU, so it gets few.
    """
    if not LIBRARY.exists():
        return {}
    return {"LD_PRELOAD": str(LIBRARY), "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}


def pack(wheel: Path, architecture: int, folder: Path) -> None:
    """Write NCCL's library from its wheel into ``folder``, without what a GPU of this architecture does not need."""
    file = folder / PACKED
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("/libnccl.so.2"))
        file.write_bytes(files.read(name))
    subprocess.run(["strip", "--strip-debug", str(file)], check=True)
    library = bytearray(file.read_bytes())
    slim(library, architecture)
    file.write_bytes(lzma.compress(library, preset=4))


def unpack(packed: Path) -> None:
    """Make ``LIBRARY`` from what ``pack`` wrote."""
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    LIBRARY.write_bytes(lzma.decompress(packed.read_bytes()))
