"""Tests of setup.py's build, and that the CUDA sources compile without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_build_reports_what_it_builds() -> None:
    assert "compiled ops for" in setup("--version").stdout
    assert "no compiled ops, because ZB_BUILD=none" in setup("--version", ZB_BUILD="none").stdout


def test_search_is_not_compiled_without_pybind11(tmp_path: Path) -> None:
    (tmp_path / "pybind11.py").write_text("raise ImportError('hidden')")
    without = setup("--version", ZB_BUILD="none", PYTHONPATH=str(tmp_path))
    assert not without.returncode
    assert (
        "no compiled search: pybind11 is not importable in the build environment (hidden); install pybind11 first"
        in without.stdout
    )
    assert "no compiled search" not in setup("--version", ZB_BUILD="none").stdout


def test_unsupported_builds_are_rejected() -> None:
    unknown = setup("--version", ZB_BUILD="gpu")
    assert unknown.returncode and "ZB_BUILD must be auto, cpu, cuda or none; got 'gpu'" in unknown.stderr
    if torch.version.cuda is None:
        without = setup("--version", ZB_BUILD="cuda")
        assert without.returncode and "ZB_BUILD=cuda needs a CUDA build of torch" in without.stderr


HEADERS = ("cublasLt.h", "cuda_runtime_api.h", "crt/host_defines.h", "nv/target")


def folder_of(header: str) -> Path | None:
    """Find the folder of a CUDA header: in ZB_CUDA_INCLUDE, in a wheel, or in the toolkit."""
    named = [Path(folder) for folder in os.environ.get("ZB_CUDA_INCLUDE", "").split(os.pathsep) if folder]
    wheels = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/include"))
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    return next((folder for folder in (*named, *wheels, toolkit) if (folder / header).exists()), None)


def compiled(folder: Path, name: str, *arguments: str) -> Path:
    """Compile CUDA sources with only the CUDA headers: without nvcc, a GPU or a CUDA build of torch."""
    folders = {header: folder_of(header) for header in HEADERS}
    if missing := [header for header, found in folders.items() if found is None]:
        pytest.skip(
            f"{' and '.join(missing)} not found; `pip download --no-deps nvidia-cublas nvidia-cuda-runtime "
            "nvidia-cuda-crt nvidia-cuda-cccl`, unzip them, and name their include folders in ZB_CUDA_INCLUDE"
        )
    include = [f"-I{found}" for found in (*dict.fromkeys(folders.values()), *cpp_extension.include_paths())]
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    command += [*include, *arguments, "-o", str(folder / name)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert not result.returncode, result.stderr
    return folder / name


def test_ops_on_cuda_compile(tmp_path: Path) -> None:
    compiled(tmp_path, "object.o", "-c", str(CSRC / "ops_cuda.cpp"))


FAKE = Path(__file__).with_name("fake_cublaslt.cpp")


def test_cublaslt_calls_describe_products_correctly(tmp_path: Path) -> None:
    """Layouts, alignments and reductions, and what is queued if cuBLASLt refuses a kernel."""
    main = FAKE.with_name("check_cublaslt.cpp")
    program = compiled(tmp_path, "program", str(main), str(FAKE), str(CSRC / "wgrad/cublaslt.cpp"))
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, "0 wrong\n")


def test_ops_on_cuda_survive_refusals(tmp_path: Path) -> None:
    """The ops on tensors of the CPU, with the fake cuBLASLt, which may refuse; also TF32 and the kept workspace."""
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    libraries += ["-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-ltorch"]
    libraries += ["-Wl,-Bsymbolic"]  # the fake, even if torch has loaded the real library
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    sources = [str(path) for path in (FAKE.with_name("fake_cuda_ops.cpp"), FAKE, CSRC / "wgrad/cublaslt.cpp")]
    library = compiled(tmp_path, "library.so", "-shared", abi, *sources, *libraries)
    command = [sys.executable, str(FAKE.with_name("try_fake_cuda_ops.py")), str(library)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert not result.returncode, result.stderr
    assert result.stderr.count("cuBLASLt refused the weight gradient of") == 1
