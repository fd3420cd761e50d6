"""Tests of setup.py's build, and that the CUDA sources compile without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[3]
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


EXTENSIONS = """
from setuptools import Extension as CppExtension
from setuptools.command.build_ext import build_ext
class BuildExtension(build_ext):
    with_options = classmethod(lambda command, **_: command)
"""
"""What ``setup.py`` uses of ``torch.utils.cpp_extension`` before it builds."""


class Pretended:
    """An environment in which torch seems to be built for CUDA, with the given headers and a compiler that may fail.

    What the compiler writes does not load. It logs its arguments.

    Args:
        builds: whether more is done than to report what would be built, for which a stand-in of torch suffices.
    """

    def __init__(self, folder: Path, version: str = "13.0", builds: bool = False) -> None:
        self.folder = folder
        self.log = folder / "log"
        site = folder / "site"
        site.mkdir()
        if builds:
            where = str(site / "torch" / "__init__.py")
            (site / "sitecustomize.py").write_text(
                f"import torch\ntorch.version.cuda = {version!r}\ntorch.__file__ = {where!r}\n"
            )
        else:
            utils = site / "torch" / "utils"
            utils.mkdir(parents=True)
            (site / "torch" / "__init__.py").write_text(f"class version:\n    cuda = {version!r}\n")
            (utils / "__init__.py").touch()
            (utils / "cpp_extension.py").write_text(EXTENSIONS)
        compiler = folder / "g++"
        compiler.write_text(
            textwrap.dedent(
                f"""\
                #!/bin/sh
                echo "$@" >>{self.log}
                case "$*" in *" $BROKEN "*) echo "$BROKEN is broken" >&2; exit 1;; esac
                while [ $# -gt 1 ]; do
                    if [ "$1" = -o ]; then : >"$2"; fi
                    shift
                done
                """
            )
        )
        compiler.chmod(0o755)
        self.environment = {
            "PYTHONPATH": str(site),
            "CC": str(compiler),
            "CXX": str(compiler),
            "BROKEN": "nothing",
            "TORCH_DONT_CHECK_COMPILER_ABI": "1",
            "CUDA_HOME": str(folder / "toolkit"),
        }

    def add(self, where: str, *headers: str, version: str = "13000") -> None:
        for header in headers:
            path = self.folder / where / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#define CUDART_VERSION  {version}\n")

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return setup(*arguments, **self.environment, **environment)

    def build(self, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Build; return the result and the arguments of the compiler whenever it linked the ops."""
        self.environment |= environment
        folders = ("--build-lib", str(self.folder / "lib"), "--build-temp", str(self.folder / "objects"))
        result = self.setup("build_ext", *folders)
        return result, [line for line in self.log.read_text().splitlines() if "_ops." in line and "-shared" in line]


def test_missing_headers_are_named_with_their_packages(tmp_path: Path) -> None:
    pretended = Pretended(tmp_path)
    pretended.add("site/nvidia/cu13/include", *HEADERS[:2])  # as torch's requirements have it
    sentence = (
        "CUDA's headers (crt/host_defines.h, nv/target); "
        "`pip install 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*'`"
    )
    auto, cuda = pretended.setup("--version"), pretended.setup("--version", ZB_BUILD="cuda")
    assert not auto.returncode and f"compiled ops for the CPU only; CUDA needs {sentence}" in auto.stdout
    assert cuda.returncode and f"ZB_BUILD=cuda needs {sentence}, or set ZB_BUILD=cpu" in cuda.stderr


def test_packages_for_cuda_12_have_other_names(tmp_path: Path) -> None:
    pretended = Pretended(tmp_path, "12.8")
    pretended.add("site/nvidia/cuda_runtime/include", "cuda_runtime_api.h", version="12080")
    pretended.add("site/nvidia/cublas/include", "cublasLt.h")
    assert (
        "`pip install 'nvidia-cuda-nvcc-cu12==12.8.*' 'nvidia-cuda-cccl-cu12==12.8.*'`"
        in pretended.setup("--version").stdout
    )


@pytest.mark.parametrize("version, is_enough", [("13020", True), ("12080", False)])
def test_headers_of_a_fitting_toolkit_complete_those_of_the_wheels(
    tmp_path: Path, version: str, is_enough: bool
) -> None:
    pretended = Pretended(tmp_path)
    pretended.add("site/nvidia/cu13/include", *HEADERS[:2])
    pretended.add("toolkit/targets/x86_64-linux/include", *HEADERS[1:3], version=version)
    pretended.add("toolkit/targets/x86_64-linux/include/cccl", HEADERS[3])
    said = pretended.setup("--version").stdout
    assert ("compiled ops for CPU and CUDA" in said) == is_enough


@pytest.mark.parametrize(
    "broken, why",
    [
        ("csrc/ops_cuda.cpp", "exit"),
        pytest.param("nothing", "what was built does not load", marks=pytest.mark.full),
    ],
    ids=["a source that does not compile", "a library that does not load"],
)
def test_ops_for_the_cpu_are_built_if_those_for_cuda_fail(tmp_path: Path, broken: str, why: str) -> None:
    pretended = Pretended(tmp_path, builds=True)
    pretended.add("site/nvidia/cu13/include", *HEADERS)
    result, links = pretended.build(BROKEN=broken)
    assert not result.returncode, result.stderr
    assert why in result.stdout.split("the ops for CUDA cannot be used")[1]
    assert list(tmp_path.glob("lib/megatron/zero_bubble/_ops*.so"))
    assert "cublaslt" not in links[-1] and "torch_cuda" not in links[-1]


@pytest.mark.full
def test_failure_is_an_error_if_cuda_was_asked_for(tmp_path: Path) -> None:
    pretended = Pretended(tmp_path, builds=True)
    pretended.add("site/nvidia/cu13/include", *HEADERS)
    result, links = pretended.build(ZB_BUILD="cuda")
    assert result.returncode and "what was built does not load" in result.stderr
    # Behind this flag, the linker keeps libraries although no symbol refers to them.
    assert links[0].index("-Wl,--no-as-needed") < links[0].index("-ltorch_cuda")


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
