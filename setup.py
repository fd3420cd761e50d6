"""Packaging: ``megatron.zero_bubble`` installs beside ``megatron.core``, in the namespace they share.

Ranges here say what the code works with; ``scripts/constraints.txt`` pins what it is tested with.
"""

import os
import re
import sysconfig
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

ROOT = Path(__file__).parent
PACKAGE = "megatron.zero_bubble"
(VERSION,) = re.findall(
    r'^__version__ = "(.+)"$', (ROOT / "megatron/zero_bubble/__init__.py").read_text(), re.MULTILINE
)


def _headers(folder: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"csrc/{folder}/*.h"))


def _planner() -> list[Extension]:
    """The search's loops. Where they are not built, the same search runs in Python, on a smaller budget."""
    try:
        import pybind11
    except ImportError as error:
        remedy = "install pybind11 first, then install this with `pip install --no-build-isolation`"
        return _say(f"no compiled search, because pybind11 is not importable here ({error}): {remedy}")
    planner = Extension(
        f"{PACKAGE}.search._planner",
        sources=["csrc/planner.cpp"],
        depends=_headers("planner"),
        include_dirs=[pybind11.get_include()],
        # No fused multiply-add: the search's results are the same to the last bit on every machine.
        extra_compile_args=["-std=c++17", "-O2", "-g0", "-ffp-contract=off", "-fvisibility=hidden"],
        optional=True,
    )
    return [planner]


def _ops() -> tuple[list[Extension], dict]:
    """The ops of the weight gradients, compiled against the torch that is installed, and the command that does it.

    ``ZB_BUILD`` says which: ``auto`` (the default: what this machine can build), ``cpu``, ``cuda`` or ``none``; with
    the second and third, what cannot be built is an error. Nothing is downloaded.
    """
    wanted = os.environ.get("ZB_BUILD", "auto")
    if wanted not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"setup.py: ZB_BUILD must be auto, cpu, cuda or none; got {wanted!r}")
    if wanted == "none":
        return _say("no compiled ops, as ZB_BUILD=none asks"), {}
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        remedy = "install torch first, then install this with `pip install --no-build-isolation`"
        if wanted != "auto":
            raise SystemExit(f"setup.py: ZB_BUILD={wanted} needs torch where it builds ({error}); {remedy}") from error
        return _say(f"no compiled ops, because torch is not to be seen here ({error}): {remedy}"), {}
    headers = None if torch.version.cuda is None else _cuda_headers(cpp_extension.CUDA_HOME)
    missing = (
        "a CUDA build of torch" if torch.version.cuda is None else "" if headers else "CUDA's headers (cublasLt.h)"
    )
    if wanted == "cuda" and missing:
        raise SystemExit(f"setup.py: ZB_BUILD=cuda needs {missing}; install that, or set ZB_BUILD=cpu")
    cuda = wanted != "cpu" and headers
    _say("compiled ops for " + ("CPU and CUDA" if cuda else f"the CPU, without {missing or 'CUDA, as ZB_BUILD asks'}"))
    # All of it is host code: the kernels are cuBLASLt's, which torch has loaded.
    ops = cpp_extension.CppExtension(
        f"{PACKAGE}._ops",
        sources=["csrc/ops.cpp", *(("csrc/ops_cuda.cpp", "csrc/wgrad/cublaslt.cpp") if cuda else ())],
        depends=_headers("wgrad"),
        include_dirs=headers if cuda else [],
        libraries=["c10_cuda", "torch_cuda"] if cuda else [],
        extra_link_args=["-Wl,--no-as-needed"] if cuda else [],
        extra_compile_args=["-O2"],
        optional=wanted == "auto",  # without it the reference in torch runs, and says so
    )
    return [ops], {"build_ext": cpp_extension.BuildExtension.with_options(use_ninja=False)}


def _cuda_headers(toolkit: str | None) -> list[str]:
    """The folders of cublasLt.h and cuda_runtime_api.h: of the wheels that torch came with, else the toolkit's."""
    wheels = sorted(Path(sysconfig.get_paths()["purelib"], "nvidia").glob("*/include"))
    folders = [*wheels, *([Path(toolkit, "include")] if toolkit else [])]
    found = [
        next((str(folder) for folder in folders if (folder / name).exists()), None)
        for name in ("cublasLt.h", "cuda_runtime_api.h")
    ]
    return sorted({folder for folder in found if folder}) if all(found) else []


def _say(text: str) -> list[Extension]:
    print(f"megatron-zero-bubble: {text}", flush=True)
    return []


OPS, COMMANDS = _ops()
setup(
    name="megatron-zero-bubble",
    version=VERSION,
    description="Zero-bubble pipeline schedules for stock megatron-core, on GPUs or CPU cores",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_namespace_packages(include=["megatron.zero_bubble", "megatron.zero_bubble.*"]),
    package_data={
        PACKAGE: ["py.typed"],
        f"{PACKAGE}.search": ["*.pyi"],
        f"{PACKAGE}.patching": ["*.json"],
        f"{PACKAGE}.render.page": ["*.css", "*.js"],
        f"{PACKAGE}.cli.playground.page": ["*.html", "*.css", "*.js"],
    },
    ext_modules=[*_planner(), *OPS],
    cmdclass=COMMANDS,
    options={"build_ext": {"force": True}},  # what was built for another torch, or without CUDA, looks new
    install_requires=["pyyaml"],  # planning needs the standard library only; a job's flags may come from YAML
    extras_require={
        "train": [
            "torch>=2.8",
            "megatron-core>=0.13,<0.21",  # the minors of patching/seams.py
            "numpy",
            "psutil",  # megatron-core's checkpoint writers: without it a save never ends
            'triton; platform_system == "Linux"',  # megatron-core imports it even where it launches no kernel
        ],
        "te": ["transformer-engine[pytorch]>=2.8"],
        "dev": [
            "build",
            "codespell",
            "hypothesis",
            "import-linter",
            "mypy",
            "pytest",
            "pytest-timeout",
            "ruff",
            "selenium",
            "types-pyyaml",
            "viztracer",
        ],
        "exact": ["ortools"],  # tests compare the bounds with this solver's optima, where it is installed
        "tensorboard": ["tensorboard"],
    },
    entry_points={"console_scripts": ["zero-bubble = megatron.zero_bubble.__main__:main"]},
)
