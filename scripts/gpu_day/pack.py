"""Collect in build/gpu_day/piece-* what a GPU machine without a network needs; every piece is at most 56 MiB.

Piece 1 has megatron-core's wheel, the extensions compiled for the machine's Python and torch, and the name of the
commit; with ``--nccl``, also an NCCL with which ranks can share one GPU. With ``--transformer-engine`` the other pieces
have its library, which is larger than one piece, in parts. The extensions are built and checked by
``scripts/check_cuda_build.sh`` in build/gpu_day/venv, which stays here.

    bash scripts/gpu_day.sh pack [--python PYTHON] [--torch 2.11.0] [--nccl 2.30.7] [--transformer-engine VERSION]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import ranks
from gpu_day import shared_nccl

PIECE_BYTES = 56 * 2**20
"""A lent machine may take 64 MiB at a time, the checkout included."""
FOLDER = ranks.ROOT / "build/gpu_day"


def main() -> int:
    """Collect, print the size of every piece, and return 1 if one is too large."""
    parser = argparse.ArgumentParser(prog="gpu_day.sh pack", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default="python3.12", help="interpreter of the machine's version (default: 3.12)")
    parser.add_argument("--torch", default="2.11.0", help="the machine's torch (default: 2.11.0)")
    parser.add_argument("--transformer-engine", metavar="VERSION", help="pack TransformerEngine, too")
    parser.add_argument("--nccl", metavar="VERSION", help="pack an NCCL with which ranks share a GPU: 2.30 or newer")
    parser.add_argument("--architecture", type=int, default=90, help="of the GPU, for --nccl (default: 90)")
    options = parser.parse_args()
    for old in FOLDER.glob("piece-*"):
        shutil.rmtree(old)
    first = FOLDER / "piece-1"
    first.mkdir(parents=True)
    (first / "commit").write_text(ranks.commit() + "\n")
    python = environment(options.python, options.torch)
    download(f"megatron-core=={pinned('megatron-core')}", first / "wheels", python)
    build(python, first / "extensions")
    if options.nccl:
        work = FOLDER / "nccl-downloads"
        download(f"nvidia-nccl-cu13=={options.nccl}", work, python, "--only-binary", ":all:")
        (wheel,) = work.glob(f"*-{options.nccl}-*.whl")
        shared_nccl.pack(wheel, options.architecture, first)
    if options.transformer_engine:
        pack_engine(options.transformer_engine, python)
    sizes = {piece.name: size(piece) for piece in sorted(FOLDER.glob("piece-*"))}
    for name, num_bytes in sizes.items():
        print(f"{FOLDER / name}: {num_bytes / 2**20:.1f} MiB")
    return int(any(num_bytes > PIECE_BYTES for num_bytes in sizes.values()))


def environment(python: str, torch: str) -> str:
    """Build and load the ops as ``check_cuda_build.sh`` does; return the interpreter of its environment."""
    venv = FOLDER / "venv"
    command = ["bash", "scripts/check_cuda_build.sh", torch, str(venv)]
    subprocess.run(command, cwd=ranks.ROOT, env={**os.environ, "ZB_PYTHON": python}, check=True)
    return str(venv / "bin/python")


def pinned(package: str) -> str:
    """The version that the tests use."""
    text = (ranks.ROOT / "scripts/constraints.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(package)}==(\S+)", text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"scripts/constraints.txt has no line {package}==VERSION; add one")
    return found[1]


def download(requirement: str, folder: Path, python: str, *more: str, alone: bool = True) -> None:
    """Download a package for the interpreter, alone or with its dependencies."""
    command = [python, "-m", "pip", "download", "--quiet", *(["--no-deps"] if alone else []), "--dest", str(folder)]
    subprocess.run([*command, *more, requirement], env=_of_pypi(), check=True)


def _of_pypi() -> dict[str, str]:
    """The environment without pip's configuration, which may prefer packages without CUDA."""
    return {
        **{k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "PYTHONPATH")},
        "PIP_CONFIG_FILE": os.devnull,
    }


def build(python: str, folder: Path) -> None:
    """Compile the extensions for the interpreter into ``folder``."""
    built = FOLDER / "built"
    arguments = ["setup.py", "--quiet", "build_ext", "--build-lib", str(built), "--build-temp", str(built / "objects")]
    variables = {**_of_pypi(), "ZB_BUILD": "cuda", "CUDA_HOME": "/nonexistent"}
    subprocess.run([python, *arguments], cwd=ranks.ROOT, env=variables, check=True)
    folder.mkdir()
    for extension in built.rglob("*.so"):
        shutil.copy2(extension, folder)
    shutil.rmtree(built)


def pack_engine(version: str, python: str) -> None:
    """Put TransformerEngine's library, in parts, and the sources of its torch extension into pieces of their own."""
    work = FOLDER / "engine-downloads"
    download(f"transformer-engine-cu13=={version}", work, python, "--only-binary", ":all:")
    download(f"transformer-engine=={version}", work, python, "--only-binary", ":all:")
    download("pydantic", work, python, "--only-binary", ":all:", alone=False)
    download(f"transformer-engine-torch=={version}", work, python, "--no-binary", ":all:", "--no-build-isolation")
    (wheel,) = work.glob("transformer_engine_cu13*.whl")
    for number, part in enumerate(split(wheel, PIECE_BYTES, work), start=2):
        folder = FOLDER / f"piece-{number}/engine"
        folder.mkdir(parents=True)
        shutil.move(str(part), folder)
    wheel.unlink()
    work.rename(FOLDER / "piece-1/engine")


def split(file: Path, num_bytes: int, folder: Path) -> Iterator[Path]:
    """Write the parts NAME.part-0-of-5, ... of a file; ``engine_install.join`` joins them."""
    content = file.read_bytes()
    starts = range(0, len(content), num_bytes)
    for number, start in enumerate(starts):
        part = folder / f"{file.name}.part-{number}-of-{len(starts)}"
        part.write_bytes(content[start : start + num_bytes])
        yield part


def size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
