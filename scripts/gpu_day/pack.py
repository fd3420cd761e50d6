"""Collect in build/gpu_day/packed what a GPU machine without a network needs, in at most 56 MiB.

That is megatron-core, the extensions compiled for the machine's Python and torch, an NCCL with which ranks can share
one GPU, and the name of the commit; with ``--transformer-engine``, also TransformerEngine with its torch extension,
which is built here (half an hour on two cores, once). Of NCCL and TransformerEngine, only the code for one
architecture is kept. The extensions are built and checked by ``scripts/check_cuda_build.sh`` in build/gpu_day/venv,
which stays here.

    bash scripts/gpu_day.sh pack [--python PYTHON] [--torch 2.11.0] [--nccl VERSION] [--transformer-engine VERSION]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from bench import ranks
from gpu_day import install, shared_nccl
from gpu_day.slim import slim

LIMIT_BYTES = 56 * 2**20
"""What can be carried at once with the checkout, where 64 MiB can."""
FOLDER = ranks.ROOT / "build/gpu_day"
_ENGINE = "transformer_engine/wheel_lib/libtransformer_engine.so"
_TOOLS = ("wheel", "ninja", "packaging")
"""What TransformerEngine's torch extension is built with, besides torch and CUDA's compiler."""
_OF_ENGINE = {"NVTE_PYTORCH_FORCE_BUILD": "TRUE", "NVTE_BUILD_USE_NVIDIA_WHEELS": "1"}
"""Without them, it first tries a download without a timeout, and finds no headers of cuDNN and NCCL."""


def main() -> int:
    """Collect, print the size, and return 1 if it is too large."""
    parser = argparse.ArgumentParser(prog="gpu_day.sh pack", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default="python3.12", help="interpreter of the machine's version (default: 3.12)")
    parser.add_argument("--torch", default="2.11.0", help="the machine's torch (default: 2.11.0)")
    parser.add_argument("--nccl", default=shared_nccl.VERSION, help="NCCL, 2.30 or newer (default: %(default)s)")
    parser.add_argument(
        "--transformer-engine", metavar="VERSION", help="pack TransformerEngine, too; 2.12.0 for torch 2.11"
    )
    parser.add_argument("--architecture", type=int, default=90, help="of the GPU (default: 90)")
    options = parser.parse_args()
    wheels, site = FOLDER / "wheels", FOLDER / "packed-site"
    for old in (install.PACKED, wheels, site):
        shutil.rmtree(old, ignore_errors=True)
    install.PACKED.mkdir(parents=True)
    (install.PACKED / "commit").write_text(ranks.commit() + "\n")
    python = environment(options.python, options.torch)
    build(python, install.PACKED / "extensions")
    download(f"nvidia-nccl-cu13=={options.nccl}", wheels, python)
    (nccl,) = wheels.glob("nvidia_nccl*.whl")
    shared_nccl.pack(nccl, options.architecture, install.PACKED)
    nccl.unlink()
    download(f"megatron-core=={pinned('megatron-core')}", wheels, python)
    if options.transformer_engine:
        build_engine(options.transformer_engine, python, wheels)
    install_together(sorted(wheels.glob("*.whl")), site, python)
    if (engine := site / _ENGINE).exists():
        library = bytearray(engine.read_bytes())
        slim(library, options.architecture)
        engine.write_bytes(library)
    shutil.make_archive(str(install.PACKED / "site"), "xztar", site)
    num_bytes = sum(path.stat().st_size for path in install.PACKED.rglob("*") if path.is_file())
    print(f"{install.PACKED}: {num_bytes / 2**20:.1f} MiB")
    return int(num_bytes > LIMIT_BYTES)


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


def download(requirement: str, folder: Path, python: str, alone: bool = True) -> None:
    """Download a wheel for the interpreter, alone or with those of its dependencies."""
    others = ["--no-deps"] if alone else []
    _pip(python, "download", "--only-binary", ":all:", *others, "--dest", str(folder), requirement)


def build_engine(version: str, python: str, wheels: Path) -> None:
    """Put TransformerEngine's wheels into a folder, of which that of the torch extension is built, unless it was."""
    download(f"transformer-engine=={version}", wheels, python)
    download(f"transformer-engine-cu13=={version}", wheels, python, alone=False)
    built = FOLDER / f"engine-{version}-{_ask(python, 'import torch; print(torch.__version__)')}"
    if not list(built.glob("*.whl")):
        cuda = _ask(python, "import torch; print(torch.version.cuda)")
        _pip(python, "install", *_TOOLS, f"nvidia-cuda-nvcc=={cuda}.*")
        home = _ask(python, "import nvidia; print(nvidia.__path__[0])") + "/cu13"
        path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
        variables = {**_OF_ENGINE, "CUDA_HOME": home, "PATH": path, "MAX_JOBS": str(os.cpu_count())}
        own = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--wheel-dir", str(built)]
        _pip(python, "wheel", *own, f"transformer-engine-torch=={version}", variables=variables)
    shutil.copytree(built, wheels, dirs_exist_ok=True)


def install_together(wheels: Iterable[Path], site: Path, python: str) -> None:
    """Install packages into a folder by one command: a second one would remove folders that several packages share."""
    _pip(python, "install", "--no-index", "--no-deps", "--no-compile", "--target", str(site), *map(str, wheels))


def _pip(python: str, command: str, *arguments: str, variables: dict[str, str] | None = None) -> None:
    environment = {**_of_pypi(), **(variables or {})}
    subprocess.run([python, "-m", "pip", command, "--quiet", *arguments], env=environment, check=True)


def _ask(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


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


if __name__ == "__main__":
    sys.exit(main())
