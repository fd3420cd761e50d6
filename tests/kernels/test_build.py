"""What setup.py builds, and that the CUDA sources compile where there is a compiler and no GPU."""

from __future__ import annotations

import os
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
    environment = {"ZB_BUILD": "auto"} | environment
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


def folder_of(header: str) -> Path | None:
    """Where a header of CUDA is: where ZB_CUDA_INCLUDE says, in a wheel, or in the toolkit."""
    named = [Path(folder) for folder in os.environ.get("ZB_CUDA_INCLUDE", "").split(os.pathsep) if folder]
    wheels = sorted(Path(sysconfig.get_paths()["purelib"], "nvidia").glob("*/include"))
    toolkit = [Path(cpp_extension.CUDA_HOME, "include")] if cpp_extension.CUDA_HOME else []
    return next((folder for folder in (*named, *wheels, *toolkit) if (folder / header).exists()), None)


@pytest.mark.parametrize(
    "source, headers",
    [("wgrad/cublaslt.cpp", ("cublasLt.h", "cuda_runtime_api.h")), ("ops_cuda.cpp", ("cuda_runtime_api.h",))],
)
def test_cuda_sources_compile(tmp_path: Path, source: str, headers: tuple[str, ...]) -> None:
    """With their headers alone: no nvcc, no GPU, no CUDA build of torch."""
    folders = {header: folder_of(header) for header in headers}
    if missing := [header for header, folder in folders.items() if folder is None]:
        pytest.skip(
            f"there is no {' and no '.join(missing)}; `pip download --no-deps nvidia-cublas nvidia-cuda-runtime "
            "nvidia-cuda-crt`, unzip them, and name their include folders in ZB_CUDA_INCLUDE"
        )
    include = [f"-I{folder}" for folder in (*folders.values(), *cpp_extension.include_paths())]
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    command += [*include, "-c", str(CSRC / source), "-o", str(tmp_path / "object.o")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert not result.returncode, result.stderr
