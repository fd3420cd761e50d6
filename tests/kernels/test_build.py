"""What setup.py builds, and that the CUDA sources compile where there is a compiler and no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"


def setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_build_says_what_it_builds() -> None:
    assert "compiled ops for" in setup("--version").stdout
    assert "no compiled ops, as ZB_BUILD=none asks" in setup("--version", ZB_BUILD="none").stdout


def test_what_cannot_be_built_is_refused() -> None:
    unknown = setup("--version", ZB_BUILD="gpu")
    assert unknown.returncode and "ZB_BUILD must be auto, cpu, cuda or none; got 'gpu'" in unknown.stderr
    if torch.version.cuda is None:
        without = setup("--version", ZB_BUILD="cuda")
        assert without.returncode and "ZB_BUILD=cuda needs a CUDA build of torch" in without.stderr


def cuda_headers() -> Path | None:
    """The folder of cuda_runtime_api.h, where nvcc is."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        return None
    folders = (Path(nvcc).resolve().parents[1] / "include", Path("/usr/local/cuda/include"))
    return next((folder for folder in folders if (folder / "cuda_runtime_api.h").exists()), None)


def cublas_headers() -> Path | None:
    """The folder of cublasLt.h: of the toolkit, of the wheel, or where ZB_CUBLAS_INCLUDE says."""
    wheels = Path(sysconfig.get_paths()["purelib"], "nvidia")
    folders = [Path(named)] if (named := os.environ.get("ZB_CUBLAS_INCLUDE")) else []
    folders += [folder for folder in [cuda_headers()] if folder] + sorted(wheels.glob("*/include"))
    return next((folder for folder in folders if (folder / "cublasLt.h").exists()), None)


NO_NVCC = pytest.mark.skipif(cuda_headers() is None, reason="there is no nvcc with cuda_runtime_api.h")


@NO_NVCC
@pytest.mark.skipif(
    cublas_headers() is None,
    reason="there is no cublasLt.h: `pip download --no-deps nvidia-cublas`, unzip it, and name its include folder in "
    "ZB_CUBLAS_INCLUDE",
)
def test_cublaslt_compiles(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    compile(nvcc, "wgrad/cublaslt.cu", cublas_headers(), tmp_path, "-std=c++17", "-Werror", "all-warnings")


@NO_NVCC
def test_ops_on_cuda_compile(tmp_path: Path) -> None:
    torch_headers = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    compiler = os.environ.get("CXX", "c++")
    compile(compiler, "ops_cuda.cpp", cuda_headers(), tmp_path, "-std=c++20", "-fPIC", *torch_headers)


def compile(compiler: str, source: str, headers: Path | None, folder: Path, *flags: str) -> None:
    command = [compiler, *flags, f"-I{headers}", "-c", str(CSRC / source), "-o", str(folder / "object.o")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert not result.returncode, result.stderr
