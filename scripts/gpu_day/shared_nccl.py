"""NCCL for ranks that share GPUs, carried to a machine whose own NCCL is older than 2.30.

The library has code for many GPUs. ``slim`` keeps that for one architecture, so the compressed library is small: it
overwrites the others with zeros, which compress well and which CUDA never loads.
"""

from __future__ import annotations

import lzma
import struct
import zipfile
from pathlib import Path

from bench.ranks import ROOT

LIBRARY = ROOT / "build/gpu_day/nccl/libnccl.so.2"
PACKED = "libnccl.so.2.xz"
_MAGIC = (0xBA55ED50).to_bytes(4, "little")
"""Begins a fat binary: images of kernels for several architectures."""
_HEADER, _IMAGE = struct.Struct("<4sHHQ"), struct.Struct("<HHIQ12xI")
"""Of a fat binary: magic number, version, bytes of the header, bytes of the images. Of an image: kind, version, bytes
of its header, bytes of its content, and the architecture, such as 90."""


def variables() -> dict[str, str]:
    """The environment of ranks that share GPUs over NCCL; empty if no library was packed.

    Every communicator of every rank takes CTAs of the same GPU, so it gets few.
    """
    if not LIBRARY.exists():
        return {}
    return {"LD_PRELOAD": str(LIBRARY), "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}


def pack(wheel: Path, architecture: int, folder: Path) -> None:
    """Write NCCL's library from its wheel, slimmed and compressed, into ``folder``."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("/libnccl.so.2"))
        library = bytearray(files.read(name))
    slim(library, architecture)
    (folder / PACKED).write_bytes(lzma.compress(library, preset=4))


def unpack(packed: Path) -> None:
    """Make ``LIBRARY`` from what ``pack`` wrote."""
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    LIBRARY.write_bytes(lzma.decompress(packed.read_bytes()))


def slim(library: bytearray, architecture: int) -> None:
    """Overwrite the images for other architectures with zeros.

    Raises:
        SystemExit: there is no image for the architecture.
    """
    kept, start = 0, library.find(_MAGIC)
    while start >= 0:
        _, _, header, num_bytes = _HEADER.unpack_from(library, start)
        image, end = start + header, start + header + num_bytes
        while image < end:
            _, _, header, num_bytes, of = _IMAGE.unpack_from(library, image)
            content = slice(image + header, image + header + num_bytes)
            if of == architecture:
                kept += 1
            else:
                library[content] = bytes(num_bytes)
            image = content.stop
        start = library.find(_MAGIC, end)
    if not kept:
        raise SystemExit(f"NCCL's library has no code for sm_{architecture}; choose another --architecture")
