"""Packaging of ``megatron.zero_bubble``, which shares the namespace package ``megatron`` with ``megatron.core``.

Version ranges here are those that the code supports; ``scripts/constraints.txt`` pins the tested versions.
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
    """The compiled loops of the search. Without them, the search runs in Python with a smaller budget."""
    try:
        import pybind11
    except ImportError as error:
        remedy = "install pybind11 first, then this package with `pip install --no-build-isolation`"
        return _say(f"no compiled search: pybind11 is not importable in the build environment ({error}); {remedy}")
    planner = Extension(
        f"{PACKAGE}.search._planner",
        sources=["csrc/planner.cpp"],
        depends=_headers("planner"),
        include_dirs=[pybind11.get_include()],
        # Without fused multiply-add, the results of the search are the same bit for bit on every machine.
        extra_compile_args=["-std=c++17", "-O2", "-g0", "-ffp-contract=off", "-fvisibility=hidden"],
        optional=True,
    )
    return [planner]


def _ops() -> tuple[list[Extension], dict]:
    """The extension with the weight-gradient ops, compiled against the installed torch, and its build command.

    ``ZB_BUILD`` selects the backend: ``auto`` (the default) builds what this machine supports; with ``cpu`` or
    ``cuda``, a failed build is an error; ``none`` builds nothing. Nothing is downloaded.
    """
    wanted = os.environ.get("ZB_BUILD", "auto")
    if wanted not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"setup.py: ZB_BUILD must be auto, cpu, cuda or none; got {wanted!r}")
    if wanted == "none":
        return _say("no compiled ops, because ZB_BUILD=none"), {}
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        remedy = "install torch first, then this package with `pip install --no-build-isolation`"
        if wanted != "auto":
            raise SystemExit(
                f"setup.py: ZB_BUILD={wanted} needs torch in the build environment ({error}); {remedy}"
            ) from error
        return _say(f"no compiled ops: torch is not importable in the build environment ({error}); {remedy}"), {}
    headers = None if torch.version.cuda is None else _cuda_headers(cpp_extension.CUDA_HOME)
    missing = (
        "a CUDA build of torch" if torch.version.cuda is None else "" if headers else "CUDA's headers (cublasLt.h)"
    )
    if wanted == "cuda" and missing:
        raise SystemExit(f"setup.py: ZB_BUILD=cuda needs {missing}; install it, or set ZB_BUILD=cpu")
    cuda = wanted != "cpu" and headers
    _say("compiled ops for " + ("CPU and CUDA" if cuda else f"the CPU only; CUDA needs {missing or 'ZB_BUILD=cuda'}"))
    # All sources are host code: the kernels are those of cuBLASLt, which torch has loaded.
    ops = cpp_extension.CppExtension(
        f"{PACKAGE}._ops",
        sources=["csrc/ops.cpp", *(("csrc/ops_cuda.cpp", "csrc/wgrad/cublaslt.cpp") if cuda else ())],
        depends=_headers("wgrad"),
        include_dirs=headers if cuda else [],
        libraries=["c10_cuda", "torch_cuda"] if cuda else [],
        extra_link_args=["-Wl,--no-as-needed"] if cuda else [],
        extra_compile_args=["-O2"],
        optional=wanted == "auto",  # without it, the reference in torch runs with a warning
    )
    return [ops], {"build_ext": cpp_extension.BuildExtension.with_options(use_ninja=False)}


def _cuda_headers(toolkit: str | None) -> list[str]:
    """The folders of cublasLt.h and cuda_runtime_api.h, from torch's NVIDIA wheels or else the CUDA toolkit."""
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
    options={"build_ext": {"force": True}},  # a build for another torch, or without CUDA, would look up to date
    install_requires=["pyyaml"],  # planning needs the standard library only; a job's flags may come from YAML
    extras_require={
        "train": [
            "torch>=2.8",
            "megatron-core>=0.13,<0.21",  # the minor versions of patching/seams.py
            "numpy",
            "psutil",  # for megatron-core's checkpoint writers; without it, a save never ends
            'triton; platform_system == "Linux"',  # megatron-core imports it even if it launches no kernel
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
        "docs": ["mkdocs-material", "mkdocstrings[python]"],  # scripts/docs.sh
        "exact": ["ortools"],  # optional; tests compare the bounds with the optima of this solver
        "tensorboard": ["tensorboard"],
    },
    entry_points={"console_scripts": ["zero-bubble = megatron.zero_bubble.__main__:main"]},
)
